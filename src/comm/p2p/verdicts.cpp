#include "comm/p2p/verdicts.h"

#include <algorithm>
#include <string>

#include "comm/liveness.h"
#include "lockstep/core/log.h"

namespace lockstep::comm::p2p {
namespace {

std::vector<int> all_but(int rank, int ranks) {
  std::vector<int> others;
  for (int other = 0; other < ranks; ++other) {
    if (other != rank) others.push_back(other);
  }
  return others;
}

ErrorContext about(const Transfer& transfer, std::vector<int> peers) {
  ErrorContext context = transfer.context();
  context.peers = std::move(peers);
  context.elapsed = transfer.deadline().elapsed();
  return context;
}

}  // namespace

std::exception_ptr lateness(const Transfer& transfer,
                            int rank,
                            int ranks,
                            const GlobalRank& global_rank) {
  if (!transfer.deadline().passed()) return nullptr;
  auto peers = transfer.peer() ? std::vector<int>{*transfer.peer()}
                               : all_but(rank, ranks);
  for (int& peer : peers) peer = global_rank(peer);
  const std::string who =
      transfer.peer() ? "rank " + std::to_string(peers.front()) : "no rank";
  const bool negated = transfer.peer().has_value();
  const std::string what =
      transfer.direction() == Direction::kSend
          ? " did not receive all of this message"
          : (negated ? " did not send all of a message" : " sent a message");
  return std::make_exception_ptr(TimeoutError(
      who + what + " with tag " + std::to_string(transfer.tag()) + " within " +
          std::to_string(transfer.timeout().count()) +
          " ms; look there for a rank that is stopped, slower or in other "
          "code, or raise the timeout",
      about(transfer, peers)));
}

std::exception_ptr loss(const Transfer& transfer, const Liveness& liveness) {
  if (!liveness.disturbed()) return nullptr;
  std::vector<int> needed;
  if (transfer.peer()) {
    needed = {*transfer.peer()};
  } else {
    needed = all_but(liveness.rank(), liveness.world_size());
    const bool all_left =
        std::all_of(needed.begin(), needed.end(), [&](int rank) {
          return liveness.has_left(rank);
        });
    if (!all_left) needed.clear();
  }
  const auto lost = liveness.peer_lost(needed, about(transfer, {}));
  return lost ? std::make_exception_ptr(*lost) : nullptr;
}

void warn(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    log::warning(e.what());
  }
}

}  // namespace lockstep::comm::p2p
