#pragma once

#include <chrono>

#include "comm/liveness.h"

namespace lockstep::distributed {

/// The group that is there at the end of the process will be left in good order
/// then. Call for each group once it stands: what its parts do at exit must
/// come later.
void end_with_process();

/// Returns when all peers have left, one was lost, or `bound` has passed.
void wait_for_goodbyes(comm::Liveness& liveness,
                       std::chrono::milliseconds bound);

}  // namespace lockstep::distributed
