#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/distributed/collectives.h"

namespace lockstep::comm::kernels {

// Kernels for two ranks that take several stretches of memory at the same time.
// A line in the other core's cache takes about a hundred nanoseconds; a core
// waits for many of them at once when it asks for them early. So these ask
// ahead, and up to four kilobytes beyond the ends, which harms nothing.
//
// The stretches may start anywhere; their lengths, but for Trade's, are
// multiples of kTwoRanksLine bytes. The results are the bits that `reduce`
// gives, except for which NaN comes of two. Thread safe; they run in the
// caller.

inline constexpr size_t kTwoRanksLine = 64;

/// Copies what goes out and what comes in. Of any length; memory of length zero
/// may be null.
struct Trade {
  char* give_to = nullptr;
  const char* give_from = nullptr;
  size_t give_bytes = 0;
  char* take_to = nullptr;
  const char* take_from = nullptr;
  size_t take_bytes = 0;
};
void trade(const Trade& trade) noexcept;

/// One step of an all-reduce: what the peer reduces goes out, the own part and
/// the peer's both become their reduction, what the peer reduced comes in.
struct Exchange {
  char* give_to;
  const char* give_from;
  char* own;
  char* peers;
  bool own_is_first;  ///< whether `own` is rank 0's
  char* take_to;
  const char* take_from;
  size_t bytes;  ///< of each of them
};
using ExchangeKernel = void (*)(const Exchange& exchange);

/// For float, double, and the signed integers of 32 and 64 bits, but no
/// averages of integers; else null.
ExchangeKernel exchange_kernel(ReduceOp op, c10::ScalarType dtype) noexcept;

/// Both stretches become their average; `first` is rank 0's.
using AverageBothKernel = void (*)(char* first, char* second, size_t bytes);

/// For float and double; else null.
AverageBothKernel average_both_kernel(c10::ScalarType dtype) noexcept;

}  // namespace lockstep::comm::kernels
