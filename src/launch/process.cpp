#include "launch/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>

#include "launch/pipe.h"
#include "launch/signals.h"
#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

std::string text_of(int error) {
  return std::generic_category().message(error);
}

/// Exit codes of a shell for a command that cannot be executed.
int exit_code_of(int error) {
  return error == ENOENT || error == ENOTDIR ? 127 : 126;
}

[[noreturn]] void cannot_execute(const std::string& path, int error) {
  std::string message = "cannot execute " + path + ": ";
  struct stat status = {};
  if (error == ENOEXEC) {
    message += "not a program of this machine, nor a script with a #! line";
  } else if (error == ENOENT && ::stat(path.c_str(), &status) == 0) {
    message += "the interpreter that it names does not exist";
  } else {
    message += text_of(error);
  }
  throw LaunchError(message, {}, exit_code_of(error));
}

/// 0 when a file can be executed, else the errno.
int executable_error(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  return ::access(path.c_str(), X_OK) == 0 ? 0 : errno;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& s : strings) result.push_back(s.data());
  result.push_back(nullptr);
  return result;
}

/// What a child needs between fork and exec, made before the fork.
struct ChildPlan {
  const char* path;
  char* const* argv;
  char* const* environment;
  int streams[3];
  const std::vector<int>* inherited;
  const Guard* guard;
  pid_t parent;
  sigset_t mask;
  int status_pipe;
};

/// Runs in a fork of a process that may have threads: async-signal-safe calls
/// only.
[[noreturn]] void become(const ChildPlan& plan) {
  ::setpgid(0, 0);
  plan.guard->watch_self();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != plan.parent) ::_exit(1);
  // The streams come from above 2, so that none overwrites another.
  for (int i = 0; i < 3; ++i) ::dup2(plan.streams[i], i);
  for (const int fd : *plan.inherited) ::fcntl(fd, F_SETFD, 0);
  reset_relayed_signals();
  ::sigprocmask(SIG_SETMASK, &plan.mask, nullptr);
  ::execve(plan.path, plan.argv, plan.environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t size =
      ::write(plan.status_pipe, &error, sizeof(error));
  ::_exit(exit_code_of(error));
}

Fd above_streams(int fd) {
  return Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

}  // namespace

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    const int error = executable_error(name);
    if (error != 0) cannot_execute(name, error);
    return name;
  }
  const char* path = std::getenv("PATH");
  std::istringstream directories(path != nullptr ? path : "/usr/bin:/bin");
  int error = ENOENT;
  for (std::string directory; std::getline(directories, directory, ':');) {
    const std::string candidate =
        (directory.empty() ? "." : directory) + '/' + name;
    const int found = executable_error(candidate);
    if (found == 0) return candidate;
    if (found == EACCES) error = found;
  }
  if (error != ENOENT) cannot_execute(name, error);
  std::string message = "cannot execute " + name + ": not found in PATH";
  if (::access(name.c_str(), F_OK) == 0) {
    message += "; for the one in this directory write ./" + name;
  }
  throw LaunchError(message, {}, 127);
}

void need_exit_statuses() {
  struct sigaction action = {};
  ::sigaction(SIGCHLD, nullptr, &action);
  const bool ignored =
      (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_IGN;
  if (!ignored && (action.sa_flags & SA_NOCLDWAIT) == 0) return;
  throw InvalidArgument(
      "this program ignores SIGCHLD, so that the exit codes of processes are "
      "lost; call signal(SIGCHLD, SIG_DFL) before it starts any");
}

Process start_process(const ProcessSpec& spec, const Guard& guard) {
  std::vector<std::string> arguments = spec.argv;
  std::vector<std::string> variables;
  for (const auto& [name, value] : spec.environment) {
    variables.push_back(name + '=' + value);
  }
  const std::vector<char*> argv = pointers(arguments);
  const std::vector<char*> environment = pointers(variables);
  Pipe status = make_pipe();
  const Fd in = above_streams(spec.in);
  const Fd out = above_streams(spec.out);
  const Fd err = above_streams(spec.err);

  ChildPlan plan = {.path = spec.path.c_str(),
                    .argv = argv.data(),
                    .environment = environment.data(),
                    .streams = {in.get(), out.get(), err.get()},
                    .inherited = &spec.inherited,
                    .guard = &guard,
                    .parent = ::getpid(),
                    .mask = {},
                    .status_pipe = status.write_end.get()};
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &plan.mask);
  const pid_t pid = ::_Fork();
  if (pid == 0) become(plan);
  const int fork_error = errno;
  ::pthread_sigmask(SIG_SETMASK, &plan.mask, nullptr);
  if (pid < 0) {
    throw LaunchError("cannot start a process for " + spec.path + ": " +
                      text_of(fork_error));
  }
  status.write_end.reset();
  int error = 0;
  ssize_t size = 0;
  do {
    size = ::read(status.read_end.get(), &error, sizeof(error));
  } while (size < 0 && errno == EINTR);
  Process process{pid, Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)))};
  if (size == sizeof(error) || !process.pidfd) {
    if (size != sizeof(error)) error = errno;
    ::kill(-pid, SIGKILL);
    guard.forget(pid);
    ::waitpid(pid, nullptr, 0);
    cannot_execute(spec.path, error);
  }
  return process;
}

std::vector<pid_t> live_groups(const std::vector<pid_t>& groups) {
  std::vector<pid_t> live;
  DIR* directory = ::opendir("/proc");
  if (directory == nullptr) return live;
  while (const dirent* entry = ::readdir(directory)) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    std::ifstream file("/proc/" + std::string(entry->d_name) + "/stat");
    std::string line;
    std::getline(file, line);
    // "pid (name) state parent group ...": the name may hold anything.
    const auto name_end = line.rfind(')');
    if (name_end == std::string::npos) continue;
    std::istringstream fields(line.substr(name_end + 1));
    char state = 0;
    pid_t parent = 0;
    pid_t group = 0;
    if (!(fields >> state >> parent >> group) || state == 'Z') continue;
    if (std::find(groups.begin(), groups.end(), group) != groups.end() &&
        std::find(live.begin(), live.end(), group) == live.end()) {
      live.push_back(group);
    }
  }
  ::closedir(directory);
  return live;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name
                         : "signal " + std::to_string(signal);
}

}  // namespace lockstep::launcher
