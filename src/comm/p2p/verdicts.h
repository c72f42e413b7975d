#pragma once

#include <exception>

#include "comm/fingerprint.h"
#include "comm/p2p/transfer.h"

namespace lockstep::comm {
class Liveness;
}

namespace lockstep::comm::p2p {

/// TimeoutError when the transfer's time is over, else null. `rank` of `ranks`
/// is this one; errors name `global_rank` of a rank.
std::exception_ptr lateness(const Transfer& transfer,
                            int rank,
                            int ranks,
                            const GlobalRank& global_rank);

/// PeerLost when a rank died or failed, or the peer left; for a receive from
/// any rank when all others left. Else null.
std::exception_ptr loss(const Transfer& transfer, const Liveness& liveness);

/// Logs the error of a transfer that nobody may be waiting for any more.
void warn(const std::exception_ptr& error);

}  // namespace lockstep::comm::p2p
