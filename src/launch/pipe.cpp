#include "launch/pipe.h"

#include <fcntl.h>

#include <cerrno>
#include <system_error>

#include "lockstep/core/error.h"

namespace lockstep::launcher {

Pipe make_pipe(int flags) {
  int ends[2];
  if (::pipe2(ends, flags | O_CLOEXEC) != 0) {
    throw LaunchError(
        "cannot make a pipe: " + std::generic_category().message(errno) +
        (errno == EMFILE ? "; raise the limit (ulimit -n)" : ""));
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

}  // namespace lockstep::launcher
