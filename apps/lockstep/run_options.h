#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/launch.h"

namespace lockstep {

/// Reads the arguments after `lockstep run`: options, then the program and its
/// arguments; `:` begins a further program. Throws CLI::ParseError (also for
/// --help) and InvalidArgument.
LaunchConfig parse_run_options(const std::vector<std::string>& arguments);

}  // namespace lockstep
