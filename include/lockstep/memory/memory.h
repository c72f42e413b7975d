#pragma once

#include <cstddef>
#include <optional>

#include "lockstep/core/export.h"

/// The memory policy for training on CPUs.
///
/// Stock libtorch takes every large tensor from the kernel and gives it back a
/// moment later, and pays for the page faults in every step. With the policy on
/// the memory of freed CPU tensors is kept and used again, as CUDA's caching
/// allocator does for device memory, and tensors of 4 MiB and more ask the
/// kernel for huge pages. What is kept never makes the tensors'
/// blocks exceed 1.25 times those that were in use at once.
///
/// It concerns all CPU tensors of the process, so it never starts by linking
/// alone: the first `DistributedDataParallel` starts it, or `enable`.
/// `LOCKSTEP_MEMORY_POLICY=off` keeps it off in any case.
namespace lockstep::memory {

struct Options {
  /// The most bytes of freed tensors that are kept. Unset: as the policy says.
  std::optional<size_t> limit_bytes = {};
};

/// Starts the policy, or changes its limit. Does nothing where
/// `LOCKSTEP_MEMORY_POLICY=off` is set. Memory already handed out is not
/// touched. Thread safe.
/// \throws InvalidArgument  `LOCKSTEP_MEMORY_POLICY` is neither on nor off
LOCKSTEP_API void enable(const Options& options = {});

/// Stops the policy and returns the kept memory to the system; tensors alive
/// return theirs when they go. A later `DistributedDataParallel` does not start
/// the policy again; `enable` does. Thread safe.
LOCKSTEP_API void disable();

/// Returns the kept memory to the system now. Thread safe; takes as long as the
/// kernel needs to unmap it.
LOCKSTEP_API void trim();

struct Statistics {
  bool enabled = false;         ///< whether the policy is on
  size_t allocated_bytes = 0;   ///< of blocks that tensors use
  size_t cached_bytes = 0;      ///< of free blocks that are kept
  size_t arena_bytes = 0;       ///< gradient arenas of all live wrappers
  size_t arena_used_bytes = 0;  ///< thereof in use
};

/// Figures of this moment. Thread safe.
[[nodiscard]] LOCKSTEP_API Statistics statistics();

}  // namespace lockstep::memory
