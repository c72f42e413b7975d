#pragma once

#include <chrono>

#include "comm/liveness.h"

namespace lockstep::distributed {

/// From now on a process that exits without destroy_process_group leaves its
/// group in good order. Thread safe.
void tie_to_process();

/// Returns when all peers have left, one was lost, or `bound` has passed.
void wait_for_goodbyes(comm::Liveness& liveness,
                       std::chrono::milliseconds bound);

}  // namespace lockstep::distributed
