#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"

namespace lockstep::comm::shm {
namespace {

void broadcast_small(Channel& channel, const Call& call, char* data) {
  const bool is_root = channel.rank() == call.root();
  if (is_root) copy(channel.next_staging(), data, call.bytes());
  channel.begin(call.fingerprint, call.timeout);
  if (!is_root) copy(data, channel.staging(call.root()), call.bytes());
}

void broadcast_large(Channel& channel, const Call& call, char* data) {
  const bool is_root = channel.rank() == call.root();
  const size_t element = call.element_size();
  const size_t chunks = ceil_div(call.bytes(), Layout::kChunk);
  channel.begin(call.fingerprint, call.timeout);
  for (size_t i = 0; i < chunks + 1; ++i) {
    if (is_root && i < chunks) {
      const Range chunk = part(call.numel(), chunks, i, element);
      copy(channel.input(call.root(), i),
           data + chunk.start * element,
           chunk.count * element);
    }
    if (!is_root && i >= 1) {
      const Range chunk = part(call.numel(), chunks, i - 1, element);
      copy(data + chunk.start * element,
           channel.input(call.root(), i - 1),
           chunk.count * element);
    }
    if (i < chunks) channel.step();
  }
}

}  // namespace

void broadcast(Channel& channel, const Call& call, char* data) {
  if (call.bytes() <= Layout::kStaging) {
    return broadcast_small(channel, call, data);
  }
  broadcast_large(channel, call, data);
}

}  // namespace lockstep::comm::shm
