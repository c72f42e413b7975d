#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"
#include "comm/backends/shm/transfer.h"
#include "comm/liveness.h"

namespace lockstep::comm::shm {
namespace {

/// What a rank stages: the bytes it sends to each rank, those it expects from
/// each, and, where that fits, what it sends to the others.
class Staged {
 public:
  Staged(const char* slot, size_t ranks)
      : slot_(slot), ranks_(ranks), data_(2 * ranks * sizeof(uint64_t)) {}

  static void write(char* slot,
                    size_t own,
                    const std::vector<Stretch>& sends,
                    const std::vector<Stretch>& receives) {
    const auto splits = splits_of(sends, receives);
    const size_t bytes = splits.size() * sizeof splits[0];
    copy(slot, splits.data(), bytes);
    const Staged staged(slot, sends.size());
    if (!staged.has_data(own)) return;
    for (size_t r = 0; r < sends.size(); ++r) {
      if (r == own) continue;
      copy(slot + staged.offset(own, r), sends[r].data, sends[r].bytes);
    }
  }

  [[nodiscard]] const uint64_t* splits() const {
    return reinterpret_cast<const uint64_t*>(slot_);
  }
  /// Of the slot of rank `from`.
  [[nodiscard]] bool has_data(size_t from) const {
    return offset(from, ranks_) <= Layout::kStaging;
  }
  [[nodiscard]] const char* data(size_t from, size_t to) const {
    return slot_ + offset(from, to);
  }

 private:
  [[nodiscard]] size_t offset(size_t from, size_t to) const {
    size_t result = data_;
    for (size_t r = 0; r < to; ++r) {
      if (r != from) result += splits()[r];
    }
    return result;
  }

  const char* slot_;
  size_t ranks_;
  size_t data_;  ///< where it starts
};

}  // namespace

void all_to_all(Channel& channel,
                const Call& call,
                const std::vector<Stretch>& sends,
                const std::vector<Stretch>& receives) {
  const auto ranks = static_cast<size_t>(channel.size());
  const auto own = static_cast<size_t>(channel.rank());
  const auto staged = [&](size_t r) {
    return Staged(channel.staging(static_cast<int>(r)), ranks);
  };
  static_assert(Layout::kStaging >= 2 * Layout::kMostRanks * sizeof(uint64_t));
  Staged::write(channel.next_staging(), own, sends, receives);
  channel.begin(call.fingerprint, call.timeout);

  const auto verdict = compare_splits(
      channel.size(),
      call.element_size(),
      [&](int r) { return staged(static_cast<size_t>(r)).splits(); },
      [&](int r) { return channel.liveness().global_rank(r); });
  if (verdict.mismatch) {
    auto context = channel.context();
    context.peers = {verdict.mismatch->rank};
    throw MismatchError(verdict.mismatch->text, std::move(context));
  }
  bool all_staged = true;
  for (size_t r = 0; r < ranks; ++r) all_staged &= staged(r).has_data(r);
  if (all_staged) {
    for (size_t r = 0; r < ranks; ++r) {
      if (r == own) continue;
      copy(receives[r].data, staged(r).data(r, own), receives[r].bytes);
    }
  } else {
    transfer(channel, sends, receives, Slots::kOnePerRank, verdict.longest);
  }
  copy(receives[own].data, sends[own].data, sends[own].bytes);
}

}  // namespace lockstep::comm::shm
