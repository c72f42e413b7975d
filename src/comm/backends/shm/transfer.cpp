#include "comm/backends/shm/transfer.h"

#include "comm/backends/shm/chunks.h"
#include "comm/kernels/two_ranks.h"

namespace lockstep::comm::shm {
namespace {

class Transfer {
 public:
  Transfer(Channel& channel,
           const std::vector<Stretch>& sends,
           const std::vector<Stretch>& receives,
           Slots slots)
      : channel_(channel),
        sends_(sends),
        receives_(receives),
        own_(static_cast<size_t>(channel.rank())),
        one_for_all_(slots == Slots::kOneForAll || sends.size() == 2),
        stride_(one_for_all_ ? Layout::kChunk
                             : Layout::kChunk / sends.size() / Layout::kLine *
                                   Layout::kLine) {}

  void run(size_t longest) const {
    const size_t chunks = ceil_div(longest, stride_);
    for (size_t i = 0; i < chunks + 1; ++i) {
      if (sends_.size() == 2) {
        give_and_take(i, chunks);
      } else {
        if (i < chunks) give(i);
        if (i >= 1) take(i - 1);
      }
      if (i < chunks) channel_.step();
    }
  }

 private:
  /// Chunk i of a stretch; empty beyond its end.
  [[nodiscard]] Stretch chunk(const Stretch& whole, size_t i) const {
    const size_t start = std::min(i * stride_, whole.bytes);
    return {whole.data + start, std::min(stride_, whole.bytes - start)};
  }
  /// What rank `from` gives to rank `to` of chunk i.
  [[nodiscard]] char* slot(size_t from, size_t to, size_t i) const {
    return channel_.input(static_cast<int>(from), i) +
           (one_for_all_ ? 0 : to * stride_);
  }

  void give(size_t i) const {
    for (size_t r = 0; r < sends_.size(); ++r) {
      const Stretch from = chunk(sends_[r], i);
      if (r == own_ || from.bytes == 0) continue;
      copy(slot(own_, r, i), from.data, from.bytes);
      if (one_for_all_) break;
    }
  }

  void take(size_t i) const {
    for (size_t r = 0; r < receives_.size(); ++r) {
      const Stretch to = chunk(receives_[r], i);
      if (r == own_ || to.bytes == 0) continue;
      copy(to.data, slot(r, own_, i), to.bytes);
    }
  }

  /// Gives chunk i and takes the one before at the same time, in a group of
  /// two.
  void give_and_take(size_t i, size_t chunks) const {
    const size_t peer = 1 - own_;
    kernels::Trade trade;
    if (i < chunks) {
      const Stretch from = chunk(sends_[peer], i);
      trade.give_to = slot(own_, peer, i);
      trade.give_from = from.data;
      trade.give_bytes = from.bytes;
    }
    if (i >= 1) {
      const Stretch to = chunk(receives_[peer], i - 1);
      trade.take_to = to.data;
      trade.take_from = slot(peer, own_, i - 1);
      trade.take_bytes = to.bytes;
    }
    kernels::trade(trade);
  }

  Channel& channel_;
  const std::vector<Stretch>& sends_;
  const std::vector<Stretch>& receives_;
  size_t own_;
  bool one_for_all_;  ///< so it is, too, where only one other reads it
  size_t stride_;
};

}  // namespace

void transfer(Channel& channel,
              const std::vector<Stretch>& sends,
              const std::vector<Stretch>& receives,
              Slots slots,
              size_t longest) {
  Transfer(channel, sends, receives, slots).run(longest);
}

}  // namespace lockstep::comm::shm
