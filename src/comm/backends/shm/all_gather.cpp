#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"

namespace lockstep::comm::shm {
namespace {

void all_gather_small(Channel& channel,
                      const Call& call,
                      const char* input,
                      const std::vector<char*>& outputs) {
  copy(channel.next_staging(), input, call.bytes());
  channel.begin(call.fingerprint, call.timeout);
  for (int r = 0; r < channel.size(); ++r) {
    if (r == channel.rank()) continue;
    copy(outputs[static_cast<size_t>(r)], channel.staging(r), call.bytes());
  }
}

void all_gather_large(Channel& channel,
                      const Call& call,
                      const char* input,
                      const std::vector<char*>& outputs) {
  const size_t element = call.element_size();
  const size_t chunks = ceil_div(call.bytes(), Layout::kChunk);
  channel.begin(call.fingerprint, call.timeout);
  for (size_t i = 0; i < chunks + 1; ++i) {
    if (i < chunks) {
      const Range chunk = part(call.numel(), chunks, i, element);
      copy(channel.input(channel.rank(), i),
           input + chunk.start * element,
           chunk.count * element);
    }
    if (i >= 1) {
      const Range chunk = part(call.numel(), chunks, i - 1, element);
      for (int r = 0; r < channel.size(); ++r) {
        if (r == channel.rank()) continue;
        copy(outputs[static_cast<size_t>(r)] + chunk.start * element,
             channel.input(r, i - 1),
             chunk.count * element);
      }
    }
    if (i < chunks) channel.step();
  }
}

}  // namespace

void all_gather(Channel& channel,
                const Call& call,
                const char* input,
                const std::vector<char*>& outputs) {
  if (call.bytes() <= Layout::kStaging) {
    all_gather_small(channel, call, input, outputs);
  } else {
    all_gather_large(channel, call, input, outputs);
  }
  char* own = outputs[static_cast<size_t>(channel.rank())];
  if (own != input) copy(own, input, call.bytes());
}

}  // namespace lockstep::comm::shm
