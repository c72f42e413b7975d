#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/distributed/collectives.h"

namespace lockstep::comm::kernels {

/// Whether `reduce` knows the pair: all integers and floating types of 16 bits
/// or more with every operation, bool with MIN (and) and MAX (or).
bool can_reduce(ReduceOp op, c10::ScalarType dtype) noexcept;

/// dst[i] = op(srcs[0][i], srcs[1][i], ...) in the order of `srcs`, so that the
/// result depends on rank order alone. half and bfloat16 accumulate in float
/// and are rounded once; AVG divides by `n_srcs` at the end (integers truncate
/// toward zero; sums wrap as libtorch's do). MIN and MAX give NaN where any
/// source has one, as torch.minimum does. `dst` may equal one of the sources.
/// No alignment needed.
/// Throws Unsupported for other dtypes. Thread safe; runs in the caller.
void reduce(ReduceOp op,
            c10::ScalarType dtype,
            void* dst,
            const void* const* srcs,
            int n_srcs,
            size_t numel);

}  // namespace lockstep::comm::kernels
