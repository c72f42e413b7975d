#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstddef>
#include <vector>

#include "comm/backends/shm/channel.h"
#include "comm/backends/shm/layout.h"
#include "comm/splits.h"
#include "lockstep/distributed/collectives.h"

namespace lockstep::comm::shm {

/// What every collective needs besides its memory.
struct Call {
  Fingerprint fingerprint;
  std::chrono::milliseconds timeout;

  [[nodiscard]] size_t numel() const { return fingerprint.numel; }
  [[nodiscard]] c10::ScalarType dtype() const {
    return static_cast<c10::ScalarType>(fingerprint.dtype);
  }
  [[nodiscard]] size_t element_size() const {
    return c10::elementSize(dtype());
  }
  [[nodiscard]] size_t bytes() const { return numel() * element_size(); }
  [[nodiscard]] ReduceOp op() const {
    return static_cast<ReduceOp>(fingerprint.reduce_op);
  }
  [[nodiscard]] int root() const { return static_cast<int>(fingerprint.root); }
};

// Each blocks until the own part is done, and throws what `Channel::begin` and
// `Channel::step` do. Small messages take one exchange of flags. Large ones go
// in chunks that stay in the cache; each step works on two or three
// consecutive chunks, every one a stage further, and the slots of a chunk are
// used again two chunks later, when all ranks are known to have left them.

/// Reduces in place. Each part of a chunk is reduced by one rank, so all ranks
/// get the same bits.
void all_reduce(Channel& channel, const Call& call, char* data);

void broadcast(Channel& channel, const Call& call, char* data);

/// `outputs[r]` becomes rank r's `input`; the own one may be `input` itself.
void all_gather(Channel& channel,
                const Call& call,
                char* input,
                const std::vector<char*>& outputs);

/// Reduces all ranks' `inputs[r]` into rank r's `output`, which may be its own
/// `inputs[r]`.
void reduce_scatter(Channel& channel,
                    const Call& call,
                    const std::vector<const char*>& inputs,
                    char* output);

/// Reduces in place at the root; the others' `data` is read only.
void reduce(Channel& channel, const Call& call, char* data);

/// `outputs[r]` becomes rank r's `input` at the root, whose own one may be
/// `input` itself; elsewhere `outputs` is empty.
void gather(Channel& channel,
            const Call& call,
            char* input,
            const std::vector<char*>& outputs);

/// `output` becomes the root's `inputs[rank]`, which may be the same memory at
/// the root; elsewhere `inputs` is empty.
void scatter(Channel& channel,
             const Call& call,
             const std::vector<char*>& inputs,
             char* output);

/// `sends[r]` goes to rank r and arrives in its `receives[rank]`. Throws
/// MismatchError, too, where the lengths differ. The call's fingerprint has the
/// element type alone.
void all_to_all(Channel& channel,
                const Call& call,
                const std::vector<Stretch>& sends,
                const std::vector<Stretch>& receives);

}  // namespace lockstep::comm::shm
