#pragma once

#include <cstddef>
#include <optional>

#include "lockstep/core/export.h"

/// The memory policy for training on CPUs.
///
/// Stock libtorch takes every large tensor from the kernel and gives it back a
/// moment later, and pays for the page faults in every step. With the policy on
/// the process keeps freed memory and uses it again: glibc's `malloc` serves
/// all sizes from its heap (`M_MMAP_MAX` 0) and returns memory only above a
/// limit (`M_TRIM_THRESHOLD`). It concerns the whole process, so it never
/// starts by linking alone: the first `DistributedDataParallel` starts it, or
/// `enable`. `LOCKSTEP_MEMORY_POLICY=off` keeps it off in any case.
namespace lockstep::memory {

struct Options {
  /// How many bytes of free memory at the end of the heap are kept; what is
  /// above goes back to the kernel. Unset: all. More than 2 GiB - 1 counts as
  /// 2 GiB - 1.
  std::optional<size_t> limit_bytes = {};
};

/// Starts the policy, or changes its limit. Does nothing where
/// `LOCKSTEP_MEMORY_POLICY=off` is set or the C library is not glibc. Memory
/// already handed out is not touched. Thread safe.
/// \throws InvalidArgument  `LOCKSTEP_MEMORY_POLICY` is neither on nor off
LOCKSTEP_API void enable(const Options& options = {});

/// Goes back to glibc's own settings and returns the kept memory to the kernel.
/// A later `DistributedDataParallel` does not start the policy again; `enable`
/// does. Thread safe.
LOCKSTEP_API void disable();

/// Returns free memory to the kernel now. Thread safe; takes as long as the
/// kernel needs to unmap it.
LOCKSTEP_API void trim();

struct Statistics {
  bool enabled = false;         ///< whether the policy is on
  size_t allocated_bytes = 0;   ///< memory in use by the whole process's malloc
  size_t cached_bytes = 0;      ///< free memory that malloc keeps
  size_t arena_bytes = 0;       ///< gradient arenas of all live wrappers
  size_t arena_used_bytes = 0;  ///< thereof in use
};

/// Figures of this moment. Thread safe.
[[nodiscard]] LOCKSTEP_API Statistics statistics();

}  // namespace lockstep::memory
