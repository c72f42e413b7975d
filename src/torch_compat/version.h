#pragma once

#include <string>

namespace lockstep::torch_compat {

/// The libtorch whose headers this was built with, "2.13.0".
std::string torch_version();

}  // namespace lockstep::torch_compat
