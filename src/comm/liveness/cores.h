#pragma once

#include <string>
#include <vector>

namespace lockstep::comm::liveness {

/// The cores that this thread may use, as one word: "0-3,8", or "?" where the
/// system does not tell.
std::string own_cores();

/// How many cores at least one of the words names; 1 where none names any.
int count_together(const std::vector<std::string>& cores);

}  // namespace lockstep::comm::liveness
