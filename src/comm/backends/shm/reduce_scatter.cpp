#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"
#include "comm/kernels/reduce.h"

namespace lockstep::comm::shm {
namespace {

class ReduceScatter {
 public:
  ReduceScatter(Channel& channel,
                const Call& call,
                const std::vector<const char*>& inputs,
                char* output)
      : channel_(channel),
        call_(call),
        inputs_(inputs),
        output_(output),
        element_(call.element_size()),
        sources_(inputs.size()) {}

  void run() {
    if (call_.bytes() * inputs_.size() <= Layout::kStaging) {
      run_small();
    } else {
      run_large();
    }
  }

 private:
  void run_small() {
    const Range all{0, call_.numel()};
    give(all, channel_.next_staging(), call_.bytes());
    channel_.begin(call_.fingerprint, call_.timeout);
    reduce_own(all, call_.bytes(), [&](int r) { return channel_.staging(r); });
  }

  void run_large() {
    // An input slot holds one piece of a chunk for every rank.
    const size_t stride =
        Layout::kChunk / inputs_.size() / Layout::kLine * Layout::kLine;
    const size_t chunks = ceil_div(call_.bytes(), stride);
    const auto chunk = [&](size_t i) {
      return part(call_.numel(), chunks, i, element_);
    };
    channel_.begin(call_.fingerprint, call_.timeout);
    for (size_t i = 0; i < chunks + 1; ++i) {
      if (i < chunks) {
        give(chunk(i), channel_.input(channel_.rank(), i), stride);
      }
      if (i >= 1) {
        reduce_own(chunk(i - 1), stride, [&](int r) -> const char* {
          return channel_.input(r, i - 1);
        });
      }
      if (i < chunks) channel_.step();
    }
  }

  /// Puts what others reduce into `slot`, rank r's at r * `stride`.
  void give(const Range& chunk, char* slot, size_t stride) const {
    for (size_t r = 0; r < inputs_.size(); ++r) {
      if (r == own()) continue;
      copy(slot + r * stride,
           inputs_[r] + chunk.start * element_,
           chunk.count * element_);
    }
  }

  template <class Slot>
  void reduce_own(const Range& chunk, size_t stride, Slot slot) {
    for (size_t r = 0; r < inputs_.size(); ++r) {
      sources_[r] = r == own() ? inputs_[r] + chunk.start * element_
                               : slot(static_cast<int>(r)) + own() * stride;
    }
    kernels::reduce(call_.op(),
                    call_.dtype(),
                    output_ + chunk.start * element_,
                    sources_.data(),
                    channel_.size(),
                    chunk.count);
  }

  [[nodiscard]] size_t own() const {
    return static_cast<size_t>(channel_.rank());
  }

  Channel& channel_;
  const Call& call_;
  const std::vector<const char*>& inputs_;
  char* output_;
  size_t element_;
  std::vector<const void*> sources_;
};

}  // namespace

void reduce_scatter(Channel& channel,
                    const Call& call,
                    const std::vector<const char*>& inputs,
                    char* output) {
  ReduceScatter(channel, call, inputs, output).run();
}

}  // namespace lockstep::comm::shm
