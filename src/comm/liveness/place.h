#pragma once

#include <string>

namespace lockstep::comm::liveness {

/// Where this process runs, as one word: kernel, network and user namespace,
/// user, host name. Processes with equal places reach each other at abstract
/// Unix sockets, and as the same user.
std::string own_place();

/// For tests: from now on the ranks of groups in this process count as on
/// several hosts, so many on each; 0: as it is.
void pretend_hosts(int ranks_per_host);
/// `own_place` of a rank as tests pretend.
std::string place_of(int rank);

}  // namespace lockstep::comm::liveness
