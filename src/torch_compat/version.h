#pragma once

#include <string>

namespace lockstep::torch_compat {

/// The libtorch that is loaded, "2.13.0": compiled-in macro of the headers.
std::string torch_version();

}  // namespace lockstep::torch_compat
