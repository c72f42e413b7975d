#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/distributed/collectives.h"

namespace lockstep::comm::kernels {

/// dst[i] = op(srcs[0][i], srcs[1][i], ...) in the order of `srcs`, so that the
/// result depends on rank order alone. half and bfloat16 accumulate in float;
/// AVG divides by `n_srcs` at the end (integers truncate toward zero; sums wrap
/// as libtorch's do). `dst` may equal one of the sources. No alignment needed.
/// Throws Unsupported for other dtypes. Thread safe; runs in the caller.
void reduce(ReduceOp op,
            c10::ScalarType dtype,
            void* dst,
            const void* const* srcs,
            int n_srcs,
            size_t numel);

}  // namespace lockstep::comm::kernels
