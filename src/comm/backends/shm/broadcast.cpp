#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"
#include "comm/backends/shm/transfer.h"

namespace lockstep::comm::shm {
namespace {

void broadcast_small(Channel& channel, const Call& call, char* data) {
  const bool is_root = channel.rank() == call.root();
  if (is_root) copy(channel.next_staging(), data, call.bytes());
  channel.begin(call.fingerprint, call.timeout);
  if (!is_root) copy(data, channel.staging(call.root()), call.bytes());
}

void broadcast_large(Channel& channel, const Call& call, char* data) {
  channel.begin(call.fingerprint, call.timeout);
  const auto ranks = static_cast<size_t>(channel.size());
  const Stretch whole{data, call.bytes()};
  std::vector<Stretch> sends(ranks);
  std::vector<Stretch> receives(ranks);
  if (channel.rank() == call.root()) {
    sends.assign(ranks, whole);
  } else {
    receives[static_cast<size_t>(call.root())] = whole;
  }
  transfer(channel, sends, receives, Slots::kOneForAll, call.bytes());
}

}  // namespace

void broadcast(Channel& channel, const Call& call, char* data) {
  if (call.bytes() <= Layout::kStaging) {
    broadcast_small(channel, call, data);
  } else {
    broadcast_large(channel, call, data);
  }
}

}  // namespace lockstep::comm::shm
