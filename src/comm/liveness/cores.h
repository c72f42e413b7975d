#pragma once

#include <string>
#include <vector>

namespace lockstep::comm::liveness {

/// The cores that this thread may use, as one word: "0-3,8".
std::string own_cores();

/// How many cores at least one of the words names. At least 1.
int count_together(const std::vector<std::string>& cores);

}  // namespace lockstep::comm::liveness
