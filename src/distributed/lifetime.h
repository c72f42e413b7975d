#pragma once

#include <chrono>
#include <string>

#include "comm/liveness.h"

namespace lockstep::distributed {

/// The group that is there at the end of the process will be left in good order
/// then, with a word to the peers if the process ends because of an error. Call
/// for each group once it stands: what its parts do at exit must come later.
void end_with_process();

/// Tells the peers that this rank ends with `reason`, and who is to blame by
/// the exception that is being handled (comm/blame.h), in all groups. Ends what
/// they have under way. Does nothing without a default group.
void fail_default_group(const std::string& reason);

/// Returns when all peers have left, one was lost, or `bound` has passed.
void wait_for_goodbyes(comm::Liveness& liveness,
                       std::chrono::milliseconds bound);

}  // namespace lockstep::distributed
