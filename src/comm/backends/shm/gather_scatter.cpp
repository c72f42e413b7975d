#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/chunks.h"
#include "comm/backends/shm/transfer.h"

namespace lockstep::comm::shm {
namespace {

void gather_small(Channel& channel,
                  const Call& call,
                  const char* input,
                  const std::vector<char*>& outputs) {
  if (channel.rank() != call.root()) {
    copy(channel.next_staging(), input, call.bytes());
  }
  channel.begin(call.fingerprint, call.timeout);
  for (size_t r = 0; r < outputs.size(); ++r) {
    const int rank = static_cast<int>(r);
    if (rank == channel.rank()) continue;
    copy(outputs[r], channel.staging(rank), call.bytes());
  }
}

void gather_large(Channel& channel,
                  const Call& call,
                  char* input,
                  const std::vector<char*>& outputs) {
  channel.begin(call.fingerprint, call.timeout);
  const auto ranks = static_cast<size_t>(channel.size());
  std::vector<Stretch> sends(ranks);
  std::vector<Stretch> receives(ranks);
  sends[static_cast<size_t>(call.root())] = {input, call.bytes()};
  for (size_t r = 0; r < outputs.size(); ++r) {
    receives[r] = {outputs[r], call.bytes()};
  }
  transfer(channel, sends, receives, Slots::kOneForAll, call.bytes());
}

void scatter_small(Channel& channel,
                   const Call& call,
                   const std::vector<char*>& inputs,
                   char* output) {
  char* staged = channel.next_staging();
  for (size_t r = 0; r < inputs.size(); ++r) {
    if (static_cast<int>(r) == call.root()) continue;
    copy(staged + r * call.bytes(), inputs[r], call.bytes());
  }
  channel.begin(call.fingerprint, call.timeout);
  if (channel.rank() == call.root()) return;
  const auto own = static_cast<size_t>(channel.rank());
  copy(output, channel.staging(call.root()) + own * call.bytes(), call.bytes());
}

void scatter_large(Channel& channel,
                   const Call& call,
                   const std::vector<char*>& inputs,
                   char* output) {
  channel.begin(call.fingerprint, call.timeout);
  const auto ranks = static_cast<size_t>(channel.size());
  std::vector<Stretch> sends(ranks);
  std::vector<Stretch> receives(ranks);
  for (size_t r = 0; r < inputs.size(); ++r) {
    sends[r] = {inputs[r], call.bytes()};
  }
  receives[static_cast<size_t>(call.root())] = {output, call.bytes()};
  transfer(channel, sends, receives, Slots::kOnePerRank, call.bytes());
}

}  // namespace

void gather(Channel& channel,
            const Call& call,
            char* input,
            const std::vector<char*>& outputs) {
  if (call.bytes() <= Layout::kStaging) {
    gather_small(channel, call, input, outputs);
  } else {
    gather_large(channel, call, input, outputs);
  }
  if (channel.rank() != call.root()) return;
  char* own = outputs[static_cast<size_t>(channel.rank())];
  if (own != input) copy(own, input, call.bytes());
}

void scatter(Channel& channel,
             const Call& call,
             const std::vector<char*>& inputs,
             char* output) {
  const auto ranks = static_cast<size_t>(channel.size());
  if (call.bytes() * ranks <= Layout::kStaging) {
    scatter_small(channel, call, inputs, output);
  } else {
    scatter_large(channel, call, inputs, output);
  }
  if (channel.rank() != call.root()) return;
  const char* own = inputs[static_cast<size_t>(channel.rank())];
  if (own != output) copy(output, own, call.bytes());
}

}  // namespace lockstep::comm::shm
