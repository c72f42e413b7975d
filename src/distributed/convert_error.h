#pragma once

#include "lockstep/core/error.h"

namespace lockstep::distributed {

/// Call in a catch block: rethrows the current exception, libtorch's as the
/// matching one of ours with `context`, ours with what its own context lacks.
[[noreturn]] void rethrow_converted(ErrorContext context);

}  // namespace lockstep::distributed
