#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "core/fd.h"
#include "launch/guard.h"
#include "launch/worker_env.h"

namespace lockstep::launcher {

/// A program to execute. Descriptors are borrowed.
struct ProcessSpec {
  std::string path;
  std::vector<std::string> argv;
  Environment environment;
  int in = 0;   ///< becomes standard input
  int out = 1;  ///< becomes standard output
  int err = 2;  ///< becomes standard error
  /// Stay open in the program under the same number.
  std::vector<int> inherited = {};
};

/// A started process, not yet reaped.
struct Process {
  pid_t pid = -1;
  Fd pidfd;  ///< readable when it has ended
};

/// Looks a program up as a shell does: in PATH unless the name has a slash.
/// Throws LaunchError with exit code 127 (not found) or 126 (not executable).
std::string find_program(const std::string& name);

/// Throws InvalidArgument when this program ignores SIGCHLD: how a process
/// ended would be lost.
void need_exit_statuses();

/// Starts a process as leader of its own group, watched by the guard, with
/// default signal handling. It is killed when the calling thread ends. Throws
/// LaunchError with exit code 127 or 126 when it cannot be executed.
Process start_process(const ProcessSpec& spec, const Guard& guard);

/// Those of `groups` that have a member which is not a zombie.
std::vector<pid_t> live_groups(const std::vector<pid_t>& groups);

/// "SIGSEGV" for 11; "signal N" for numbers without a name.
std::string signal_name(int signal);

}  // namespace lockstep::launcher
