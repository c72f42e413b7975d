#include "comm/kernels/reduce.h"
#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"

namespace lockstep::comm::shm {
namespace {

/// At the root: reduces what lies in the slots with its own part, in place.
template <class Slot>
void reduce_own(const Channel& channel,
                const Call& call,
                char* data,
                size_t numel,
                Slot slot) {
  std::vector<const void*> sources;
  for (int r = 0; r < channel.size(); ++r) {
    sources.push_back(r == channel.rank() ? data : slot(r));
  }
  kernels::reduce(
      call.op(), call.dtype(), data, sources.data(), channel.size(), numel);
}

void reduce_small(Channel& channel, const Call& call, char* data) {
  const bool is_root = channel.rank() == call.root();
  if (!is_root) copy(channel.next_staging(), data, call.bytes());
  channel.begin(call.fingerprint, call.timeout);
  if (!is_root) return;
  reduce_own(channel, call, data, call.numel(), [&](int r) {
    return channel.staging(r);
  });
}

void reduce_large(Channel& channel, const Call& call, char* data) {
  const bool is_root = channel.rank() == call.root();
  const size_t element = call.element_size();
  const size_t chunks = ceil_div(call.bytes(), Layout::kChunk);
  channel.begin(call.fingerprint, call.timeout);
  for (size_t i = 0; i < chunks + 1; ++i) {
    if (!is_root && i < chunks) {
      const Range chunk = part(call.numel(), chunks, i, element);
      copy(channel.input(channel.rank(), i),
           data + chunk.start * element,
           chunk.count * element);
    }
    if (is_root && i >= 1) {
      const Range chunk = part(call.numel(), chunks, i - 1, element);
      reduce_own(channel,
                 call,
                 data + chunk.start * element,
                 chunk.count,
                 [&](int r) -> const char* { return channel.input(r, i - 1); });
    }
    if (i < chunks) channel.step();
  }
}

}  // namespace

void reduce(Channel& channel, const Call& call, char* data) {
  if (call.bytes() <= Layout::kStaging) {
    return reduce_small(channel, call, data);
  }
  reduce_large(channel, call, data);
}

}  // namespace lockstep::comm::shm
