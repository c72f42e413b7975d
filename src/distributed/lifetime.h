#pragma once

#include <chrono>

#include "comm/liveness.h"

namespace lockstep::distributed {

/// From now on the end of the process ends its group in good order: at exit it
/// says goodbye, and an uncaught exception is printed with the rank and told to
/// the peers before the process aborts. Once per process; thread safe.
void tie_to_process();

/// Returns when all peers have left, one was lost, or `bound` has passed.
void wait_for_goodbyes(comm::Liveness& liveness,
                       std::chrono::milliseconds bound);

}  // namespace lockstep::distributed
