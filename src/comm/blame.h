#pragma once

#include <string>

#include "comm/liveness.h"

namespace lockstep::comm {

/// Tells the peers that this rank ends with `reason`, and who is to blame by
/// the exception that is being handled: a PeerLost is a consequence, of a
/// TimeoutError the rank that it names is the culprit, where they name a rank
/// that `liveness` watches; of anything else this rank.
void announce_current_exception(Liveness& liveness, const std::string& reason);

}  // namespace lockstep::comm
