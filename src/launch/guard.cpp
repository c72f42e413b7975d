#include "launch/guard.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

/// The guard's whole life, in a fork of a process that may have threads: only
/// async-signal-safe calls. A positive number adds a group, a negative one
/// removes it.
[[noreturn]] void guard_groups(int socket,
                               int other_end,
                               pid_t* groups,
                               size_t capacity) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_NAME, "lockstep-guard");
  // By itself, since old kernels know no close_range.
  ::close(other_end);
  ::dup2(socket, STDIN_FILENO);
  ::close_range(1, ~0U, 0);
  for (;;) {
    pid_t message = 0;
    const ssize_t size = ::read(STDIN_FILENO, &message, sizeof(message));
    if (size < 0 && errno == EINTR) continue;
    if (size != sizeof(message)) break;
    const pid_t from = message > 0 ? 0 : -message;
    const pid_t to = message > 0 ? message : 0;
    for (size_t i = 0; i < capacity; ++i) {
      if (groups[i] != from) continue;
      groups[i] = to;
      break;
    }
  }
  for (size_t i = 0; i < capacity; ++i) {
    if (groups[i] > 0) ::kill(-groups[i], SIGKILL);
  }
  ::_exit(0);
}

}  // namespace

Guard::Guard(size_t capacity) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw LaunchError("cannot make a socket: " +
                      std::generic_category().message(errno));
  }
  const Fd guards_end(ends[0]);
  socket_.reset(ends[1]);
  std::vector<pid_t> groups(capacity, 0);
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pid_ = ::_Fork();
  if (pid_ == 0) {
    guard_groups(guards_end.get(), ends[1], groups.data(), capacity);
  }
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid_ < 0) {
    throw LaunchError("cannot start a process: " +
                      std::generic_category().message(error));
  }
}

Guard::~Guard() {
  socket_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guard::watch_self() const noexcept {
  const pid_t self = ::getpid();
  ::send(socket_.get(), &self, sizeof(self), MSG_NOSIGNAL);
}

void Guard::forget(pid_t group) const noexcept {
  const pid_t message = -group;
  ::send(socket_.get(), &message, sizeof(message), MSG_NOSIGNAL);
}

}  // namespace lockstep::launcher
