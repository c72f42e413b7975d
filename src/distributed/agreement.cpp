#include "distributed/agreement.h"

#include <algorithm>
#include <utility>

#include "comm/store_texts.h"
#include "lockstep/core/error.h"

namespace lockstep::distributed {
namespace {

std::string key_of(int rank) {
  return "lockstep/wanted/" + std::to_string(rank);
}

/// Throws when one of the ranks will not come any more.
void look_for_loss(const comm::Liveness& liveness,
                   const std::vector<int>& ranks,
                   const ErrorContext& context) {
  if (!liveness.disturbed()) return;
  const auto lost = [&](int rank) {
    const auto failure = liveness.failure();
    return liveness.has_left(rank) || (failure && failure->rank == rank);
  };
  if (!std::any_of(ranks.begin(), ranks.end(), lost)) return;
  if (auto error = liveness.peer_lost(ranks, context)) throw *error;
}

}  // namespace

Agreement::Agreement(const Group& whole,
                     std::vector<int> ranks,
                     c10::intrusive_ptr<c10d::Store> store,
                     const std::string& own)
    : liveness_(whole.liveness), store_(std::move(store)) {
  if (!liveness_ || ranks.size() < 2) return;
  ranks_ = std::move(ranks);
  comm::set_text(*store_, key_of(whole.global_rank), own);
}

void Agreement::reach(const Deadline& deadline, ErrorContext context) const {
  if (ranks_.empty()) return;
  const auto texts = comm::texts_of(*store_, ranks_, key_of, deadline, [&] {
    look_for_loss(*liveness_, ranks_, context);
  });
  for (size_t i = 1; i < texts.size(); ++i) {
    if (texts[i] == texts[0]) continue;
    context.peers = {ranks_[i]};
    throw MismatchError(
        "the ranks differ: rank " + std::to_string(ranks_[0]) + " asks for " +
            texts[0] + ", rank " + std::to_string(ranks_[i]) + " for " +
            texts[i] + "; all ranks must make the same calls in the same order",
        std::move(context));
  }
}

}  // namespace lockstep::distributed
