#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/all_reduce_pair.h"
#include "comm/backends/shm/chunks.h"
#include "comm/kernels/reduce.h"

namespace lockstep::comm::shm {
namespace {

using Sources = std::vector<const void*>;

void all_reduce_small(Channel& channel, const Call& call, char* data) {
  copy(channel.next_staging(), data, call.bytes());
  channel.begin(call.fingerprint, call.timeout);
  Sources sources;
  for (int r = 0; r < channel.size(); ++r) {
    sources.push_back(r == channel.rank() ? data : channel.staging(r));
  }
  kernels::reduce(call.op(),
                  call.dtype(),
                  data,
                  sources.data(),
                  channel.size(),
                  call.numel());
}

/// A reduce-scatter and an all-gather of each chunk.
class LargeAllReduce {
 public:
  LargeAllReduce(Channel& channel, const Call& call, char* data)
      : channel_(channel),
        call_(call),
        data_(data),
        ranks_(static_cast<size_t>(channel.size())),
        element_(call.element_size()),
        chunks_(ceil_div(call.bytes(), Layout::kChunk)),
        sources_(ranks_) {}

  void run() {
    channel_.begin(call_.fingerprint, call_.timeout);
    for (size_t i = 0; i < chunks_ + 2; ++i) {
      if (i < chunks_) give(i);
      if (i >= 1 && i <= chunks_) reduce_own_part(i - 1);
      if (i >= 2) take(i - 2);
      if (i <= chunks_) channel_.step();
    }
  }

 private:
  /// Of the elements of the chunk.
  [[nodiscard]] Range part_of(const Range& chunk, int rank) const {
    return part(chunk.count, ranks_, static_cast<size_t>(rank), element_);
  }
  [[nodiscard]] Range chunk(size_t i) const {
    return part(call_.numel(), chunks_, i, element_);
  }
  [[nodiscard]] char* data_at(const Range& in, const Range& at) const {
    return data_ + (in.start + at.start) * element_;
  }

  /// Puts what others reduce into the own input slot.
  void give(size_t i) {
    const Range whole = chunk(i);
    char* slot = channel_.input(channel_.rank(), i);
    for (int r = 0; r < channel_.size(); ++r) {
      if (r == channel_.rank()) continue;
      const Range at = part_of(whole, r);
      copy(slot + at.start * element_, data_at(whole, at), at.count * element_);
    }
  }

  void reduce_own_part(size_t i) {
    const Range whole = chunk(i);
    const Range own = part_of(whole, channel_.rank());
    for (int r = 0; r < channel_.size(); ++r) {
      sources_[static_cast<size_t>(r)] =
          r == channel_.rank() ? data_at(whole, own)
                               : channel_.input(r, i) + own.start * element_;
    }
    char* result = data_at(whole, own);
    kernels::reduce(call_.op(),
                    call_.dtype(),
                    result,
                    sources_.data(),
                    channel_.size(),
                    own.count);
    copy(channel_.output(channel_.rank(), i), result, own.count * element_);
  }

  /// Fetches what others reduced.
  void take(size_t i) {
    const Range whole = chunk(i);
    for (int r = 0; r < channel_.size(); ++r) {
      if (r == channel_.rank()) continue;
      const Range at = part_of(whole, r);
      copy(data_at(whole, at), channel_.output(r, i), at.count * element_);
    }
  }

  Channel& channel_;
  const Call& call_;
  char* data_;
  size_t ranks_;
  size_t element_;
  size_t chunks_;
  Sources sources_;
};

}  // namespace

void all_reduce(Channel& channel, const Call& call, char* data) {
  if (call.bytes() <= Layout::kStaging) {
    return all_reduce_small(channel, call, data);
  }
  if (channel.size() == 2) return all_reduce_pair(channel, call, data);
  LargeAllReduce(channel, call, data).run();
}

}  // namespace lockstep::comm::shm
