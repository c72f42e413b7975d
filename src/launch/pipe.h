#pragma once

#include "core/fd.h"

namespace lockstep::launcher {

struct Pipe {
  Fd read_end;
  Fd write_end;
};

/// Both ends are CLOEXEC; `flags` as for pipe2. Throws LaunchError.
Pipe make_pipe(int flags = 0);

}  // namespace lockstep::launcher
