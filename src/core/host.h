#pragma once

#include <string>

namespace lockstep {

/// This machine's name, for messages only; nothing is looked up by it.
std::string host_name();

}  // namespace lockstep
