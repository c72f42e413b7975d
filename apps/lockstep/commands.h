#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// `lockstep run`. Returns the exit code.
int run_command(const std::vector<std::string>& arguments);

}  // namespace lockstep
