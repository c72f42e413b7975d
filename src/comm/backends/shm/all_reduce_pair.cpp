#include "comm/backends/shm/all_reduce_pair.h"

#include "comm/backends/shm/chunks.h"
#include "comm/kernels/reduce.h"
#include "comm/kernels/two_ranks.h"

namespace lockstep::comm::shm {
namespace {

/// Each rank reduces half of each chunk. A slot first holds what its owner gave
/// to the peer, then, in its place, the result: the cache of the rank that read
/// a line is where it will be written next, so it crosses from core to core
/// once in each direction and is never fetched only to be overwritten.
class AllReducePair {
 public:
  AllReducePair(Channel& channel, const Call& call, char* data)
      : channel_(channel),
        call_(call),
        data_(data),
        own_(channel.rank()),
        peer_(1 - channel.rank()),
        element_(call.element_size()),
        chunks_(ceil_div(call.bytes(), Layout::kChunk)),
        kernel_(kernels::exchange_kernel(call.op(), call.dtype())) {}

  void run() {
    channel_.begin(call_.fingerprint, call_.timeout);
    for (size_t i = 0; i < chunks_ + 2; ++i) {
      if (!exchange(i)) {
        if (i < chunks_) give(i);
        if (i >= 1 && i <= chunks_) reduce(i - 1);
        if (i >= 2) take(i - 2);
      }
      if (i <= chunks_) channel_.step();
    }
  }

 private:
  struct Part {
    char* data;
    size_t count;
  };

  /// What `rank` reduces of chunk i. The chunk has an even number of lines, so
  /// that both parts are equal; only the very last ones may be not.
  [[nodiscard]] Part part_of(size_t i, int rank) const {
    const Range chunk = part(call_.numel(), chunks_, i, element_, 2);
    const Range at = part(chunk.count, 2, static_cast<size_t>(rank), element_);
    return {data_ + (chunk.start + at.start) * element_, at.count};
  }

  /// Does all three stages at once. False, and nothing done, without a kernel
  /// for that, or unless three chunks with parts of equal length are under way.
  [[nodiscard]] bool exchange(size_t i) const {
    static_assert(Layout::kLine % kernels::kTwoRanksLine == 0);
    if (kernel_ == nullptr || i < 2 || i >= chunks_) return false;
    const Part given = part_of(i, peer_);
    const Part reduced = part_of(i - 1, own_);
    const Part taken = part_of(i - 2, peer_);
    if (given.count != reduced.count || taken.count != reduced.count) {
      return false;
    }
    kernel_({.give_to = channel_.exchange(own_, i),
             .give_from = given.data,
             .own = reduced.data,
             .peers = channel_.exchange(peer_, i - 1),
             .own_is_first = own_ == 0,
             .take_to = taken.data,
             .take_from = channel_.exchange(own_, i - 2),
             .bytes = reduced.count * element_});
    return true;
  }

  /// Puts what the peer reduces into the own slot.
  void give(size_t i) const {
    const Part given = part_of(i, peer_);
    copy(channel_.exchange(own_, i), given.data, given.count * element_);
  }

  /// Reduces the own part, and what the peer gave in its place.
  void reduce(size_t i) const {
    const Part reduced = part_of(i, own_);
    char* slot = channel_.exchange(peer_, i);
    const void* own_first[] = {reduced.data, slot};
    const void* peer_first[] = {slot, reduced.data};
    kernels::reduce(call_.op(),
                    call_.dtype(),
                    reduced.data,
                    own_ == 0 ? own_first : peer_first,
                    2,
                    reduced.count);
    copy(slot, reduced.data, reduced.count * element_);
  }

  /// Fetches what the peer reduced.
  void take(size_t i) const {
    const Part taken = part_of(i, peer_);
    copy(taken.data, channel_.exchange(own_, i), taken.count * element_);
  }

  Channel& channel_;
  const Call& call_;
  char* data_;
  int own_;
  int peer_;
  size_t element_;
  size_t chunks_;
  kernels::ExchangeKernel kernel_;
};

}  // namespace

void all_reduce_pair(Channel& channel, const Call& call, char* data) {
  AllReducePair(channel, call, data).run();
}

}  // namespace lockstep::comm::shm
