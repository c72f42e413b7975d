#include "comm/blame.h"

#include <exception>

namespace lockstep::comm {

void announce_current_exception(Liveness& liveness, const std::string& reason) {
  std::optional<int> culprit;
  try {
    if (std::current_exception()) throw;
  } catch (const PeerLost& error) {
    const auto& peers = error.context().peers;
    if (peers.empty() || liveness.rank_of(peers.front())) {
      liveness.leave();
      return;
    }
  } catch (const TimeoutError& error) {
    const auto& peers = error.context().peers;
    if (!peers.empty()) culprit = liveness.rank_of(peers.front());
  } catch (...) {
  }
  liveness.announce_failure(reason, culprit);
}

}  // namespace lockstep::comm
