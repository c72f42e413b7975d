#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"
#include "comm/backends/shm/transfer.h"

namespace lockstep::comm::shm {
namespace {

void all_gather_small(Channel& channel,
                      const Call& call,
                      char* input,
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
                      char* input,
                      const std::vector<char*>& outputs) {
  channel.begin(call.fingerprint, call.timeout);
  const std::vector<Stretch> sends(outputs.size(), {input, call.bytes()});
  std::vector<Stretch> receives;
  for (char* output : outputs) receives.push_back({output, call.bytes()});
  transfer(channel, sends, receives, Slots::kOneForAll, call.bytes());
}

}  // namespace

void all_gather(Channel& channel,
                const Call& call,
                char* input,
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
