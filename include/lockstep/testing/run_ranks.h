#pragma once

#include <functional>

#include "lockstep/core/export.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep::testing {

/// Runs `fn(rank)` on `n` threads, each a rank of a group of its own over an
/// in-memory store: for tests, sanitizers and debuggers. Each thread has called
/// `init_process_group` with `options` (rank and world size are set here) and
/// destroys its group at the end, also after an exception. Returns when all
/// threads ended; the exception of the first rank that failed in time is
/// rethrown.
LOCKSTEP_API void run_ranks(int n,
                            const std::function<void(int rank)>& fn,
                            InitOptions options = {});

}  // namespace lockstep::testing
