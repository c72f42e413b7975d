#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"

namespace lockstep::comm::shm {
namespace {

/// Stretches of different contents from rank to rank, each through the slot of
/// the rank that it comes from.
class Transfer {
 public:
  /// `destinations`: to how many ranks one rank sends, 1 or all.
  Transfer(Channel& channel,
           const std::vector<Stretch>& sends,
           const std::vector<Stretch>& receives,
           size_t destinations)
      : channel_(channel),
        sends_(sends),
        receives_(receives),
        destinations_(destinations),
        own_(static_cast<size_t>(channel.rank())) {}

  void run(const Call& call, size_t longest) {
    copy(receives_[own_].data,
         sends_[own_].data,
         receives_[own_].data == sends_[own_].data ? 0 : sends_[own_].bytes);
    if (longest * destinations_ <= Layout::kStaging) {
      give(channel_.next_staging(), 0, longest);
      channel_.begin(call.fingerprint, call.timeout);
      take([&](int r) { return channel_.staging(r); }, 0, longest);
      return;
    }
    const size_t stride =
        Layout::kChunk / destinations_ / Layout::kLine * Layout::kLine;
    const size_t chunks = ceil_div(longest, stride);
    channel_.begin(call.fingerprint, call.timeout);
    for (size_t i = 0; i < chunks + 1; ++i) {
      if (i < chunks) {
        give(channel_.input(channel_.rank(), i), i * stride, stride);
      }
      if (i >= 1) {
        take([&](int r) -> const char* { return channel_.input(r, i - 1); },
             (i - 1) * stride,
             stride);
      }
      if (i < chunks) channel_.step();
    }
  }

 private:
  /// Where in a slot that which goes to `rank` lies.
  [[nodiscard]] size_t place(size_t rank, size_t stride) const {
    return destinations_ == 1 ? 0 : rank * stride;
  }

  static size_t left(const Stretch& stretch, size_t start, size_t stride) {
    return start < stretch.bytes ? std::min(stride, stretch.bytes - start) : 0;
  }

  void give(char* slot, size_t start, size_t stride) const {
    for (size_t r = 0; r < sends_.size(); ++r) {
      const size_t bytes = left(sends_[r], start, stride);
      if (r == own_ || bytes == 0) continue;
      copy(slot + place(r, stride), sends_[r].data + start, bytes);
    }
  }

  template <class Slot>
  void take(Slot slot, size_t start, size_t stride) const {
    for (size_t r = 0; r < receives_.size(); ++r) {
      const size_t bytes = left(receives_[r], start, stride);
      if (r == own_ || bytes == 0) continue;
      copy(receives_[r].data + start,
           slot(static_cast<int>(r)) + place(own_, stride),
           bytes);
    }
  }

  Channel& channel_;
  const std::vector<Stretch>& sends_;
  const std::vector<Stretch>& receives_;
  size_t destinations_;
  size_t own_;
};

}  // namespace

void gather(Channel& channel,
            const Call& call,
            char* input,
            const std::vector<char*>& outputs) {
  const auto ranks = static_cast<size_t>(channel.size());
  std::vector<Stretch> sends(ranks);
  std::vector<Stretch> receives(ranks);
  sends[static_cast<size_t>(call.root())] = {input, call.bytes()};
  for (size_t r = 0; r < outputs.size(); ++r) {
    receives[r] = {outputs[r], call.bytes()};
  }
  Transfer(channel, sends, receives, 1).run(call, call.bytes());
}

void scatter(Channel& channel,
             const Call& call,
             const std::vector<char*>& inputs,
             char* output) {
  const auto ranks = static_cast<size_t>(channel.size());
  std::vector<Stretch> sends(ranks);
  std::vector<Stretch> receives(ranks);
  for (size_t r = 0; r < inputs.size(); ++r) {
    sends[r] = {inputs[r], call.bytes()};
  }
  receives[static_cast<size_t>(call.root())] = {output, call.bytes()};
  Transfer(channel, sends, receives, ranks).run(call, call.bytes());
}

void all_to_all(Channel& channel,
                const Call& call,
                const std::vector<Stretch>& sends,
                const std::vector<Stretch>& receives) {
  const auto ranks = static_cast<size_t>(channel.size());
  const auto splits = splits_of(sends, receives);
  static_assert(Layout::kStaging >= 2 * Layout::kMostRanks * sizeof(uint64_t));
  copy(channel.next_staging(), splits.data(), splits.size() * sizeof splits[0]);
  channel.begin(call.fingerprint, call.timeout);
  const auto verdict =
      compare_splits(channel.size(), call.element_size(), [&](int r) {
        return reinterpret_cast<const uint64_t*>(channel.staging(r));
      });
  if (verdict.mismatch) {
    auto context = channel.context();
    context.peers = {verdict.mismatch->rank};
    throw MismatchError(verdict.mismatch->text, std::move(context));
  }
  Transfer(channel, sends, receives, ranks).run(call, verdict.longest);
}

}  // namespace lockstep::comm::shm
