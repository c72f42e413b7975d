#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/distributed/collectives.h"

namespace lockstep::comm::kernels {

// Kernels for two ranks that take several stretches of memory at the same time.
// A line in the other core's cache takes about a hundred nanoseconds; a core
// waits for many of them at once when it asks for them early, for those that it
// will write in particular.
//
// They give the bits that `reduce` gives. There are none for half, bfloat16,
// bool, integers of less than 32 bits and averages of integers. All bytes are
// multiples of 64. Thread safe; they run in the caller.

/// One step of an all-reduce: what the peer reduces goes out, the own part is
/// reduced in place and goes out, what the peer reduced comes in.
struct Exchange {
  char* give_to;
  const char* give_from;
  const char* first;  ///< `own` or the peer's, in rank order
  const char* second;
  char* own;
  char* result;  ///< gets a copy of `own`
  char* take_to;
  const char* take_from;
  size_t bytes;  ///< of each of them
};
using ExchangeKernel = void (*)(const Exchange& exchange);

/// Null where there is none.
ExchangeKernel exchange_kernel(ReduceOp op, c10::ScalarType dtype) noexcept;

/// Both stretches become their reduction; `first` is rank 0's.
using ReduceBothKernel = void (*)(char* first, char* second, size_t bytes);

/// Null where there is none.
ReduceBothKernel reduce_both_kernel(ReduceOp op,
                                    c10::ScalarType dtype) noexcept;

}  // namespace lockstep::comm::kernels
