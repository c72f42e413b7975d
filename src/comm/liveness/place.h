#pragma once

#include <string>

namespace lockstep::comm::liveness {

/// Where this process runs, as one word: kernel, network and user namespace,
/// user, host name. Processes with equal places reach each other at abstract
/// Unix sockets, and as the same user.
std::string own_place();

}  // namespace lockstep::comm::liveness
