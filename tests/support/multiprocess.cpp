#include "support/multiprocess.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <system_error>
#include <thread>

#include "core/clock.h"

namespace lockstep::test {
namespace {

constexpr const char* kEntryFlag = "--lockstep-test-process";

std::map<std::string, int (*)()>& entries() {
  static std::map<std::string, int (*)()> map;
  return map;
}

int checked(int result, const char* what) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
  return result;
}

Fd output_file(const char* name) {
  Fd fd(checked(::memfd_create(name, MFD_CLOEXEC), "memfd_create"));
  checked(::fcntl(fd.get(), F_SETFL, O_APPEND), "fcntl");
  return fd;
}

std::string content(const Fd& fd) {
  std::string text;
  char buffer[4096];
  while (true) {
    const auto n = ::pread(
        fd.get(), buffer, sizeof buffer, static_cast<off_t>(text.size()));
    if (n <= 0) return text;
    text.append(buffer, static_cast<size_t>(n));
  }
}

std::vector<std::string> merged_environment(const Environment& changes) {
  Environment all;
  for (char** line = environ; *line != nullptr; ++line) {
    const std::string_view text = *line;
    const auto equals = text.find('=');
    if (equals != std::string_view::npos) {
      all.emplace(text.substr(0, equals), text.substr(equals + 1));
    }
  }
  for (const auto& [name, value] : changes) all[name] = value;
  std::vector<std::string> lines;
  for (const auto& [name, value] : all) lines.push_back(name + '=' + value);
  return lines;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

Command at_entry(const std::string& entry, Environment env) {
  static const std::string binary =
      std::filesystem::read_symlink("/proc/self/exe").string();
  return {.argv = {binary, kEntryFlag, entry}, .env = std::move(env)};
}

std::ostream& operator<<(std::ostream& stream, const Result& result) {
  stream << "exit code " << result.exit_code;
  if (result.signal != 0) {
    stream << ", signal " << result.signal << " (" << ::strsignal(result.signal)
           << ')';
  }
  if (result.timed_out) stream << ", past its deadline";
  return stream << "\n--- stdout\n"
                << result.out << "\n--- stderr\n"
                << result.err << "\n---";
}

Process::Process(const Command& command)
    : out_(output_file("stdout")), err_(output_file("stderr")) {
  auto argument_strings = command.argv;
  auto environment_strings = merged_environment(command.env);
  const auto argv = pointers(argument_strings);
  const auto envp = pointers(environment_strings);
  const Fd in(checked(::open("/dev/null", O_RDONLY | O_CLOEXEC), "open"));
  const pid_t parent = ::getpid();

  pid_ = checked(::fork(), "fork");
  if (pid_ == 0) {
    // Only async-signal-safe calls: other threads of the test may run.
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(in.get(), STDIN_FILENO);
    ::dup2(out_.get(), STDOUT_FILENO);
    ::dup2(err_.get(), STDERR_FILENO);
    if (command.directory.empty() || ::chdir(command.directory.c_str()) == 0) {
      ::execvpe(argv[0], argv.data(), envp.data());
    }
    ::perror(argv[0]);
    ::_exit(127);
  }
  ::setpgid(pid_, pid_);
  pidfd_.reset(checked(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)),
                       "pidfd_open"));
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::move(other.pidfd_)),
      out_(std::move(other.out_)),
      err_(std::move(other.err_)),
      status_(other.status_) {
}

Process::~Process() {
  if (pid_ > 0) end_group();
}

std::string Process::out() const {
  return content(out_);
}

std::string Process::err() const {
  return content(err_);
}

void Process::signal(int number) const {
  if (status_ == -1) ::kill(pid_, number);
}

bool Process::ended_within(milliseconds timeout) {
  const Deadline deadline(timeout);
  while (status_ == -1) {
    pollfd wait{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    const int ready =
        ::poll(&wait, 1, static_cast<int>(deadline.remaining().count()));
    if (ready > 0) {
      checked(::waitpid(pid_, &status_, 0), "waitpid");
    } else if (ready == 0) {
      return false;
    }
  }
  return true;
}

void Process::end_group() {
  ::kill(-pid_, SIGKILL);
  while (status_ == -1 && ::waitpid(pid_, &status_, 0) < 0 && errno == EINTR) {
  }
}

bool Process::wait_for_output(std::string_view text, milliseconds timeout) {
  const Deadline deadline(timeout);
  while (true) {
    const bool ended = ended_within(2ms);
    if (out().find(text) != std::string::npos) return true;
    if (ended || deadline.passed()) return false;
  }
}

Result Process::wait(milliseconds timeout) {
  Result result;
  if (!ended_within(timeout)) {
    result.timed_out = true;
    signal(SIGTERM);
    if (!ended_within(2s)) end_group();
  }
  if (WIFEXITED(status_)) result.exit_code = WEXITSTATUS(status_);
  if (WIFSIGNALED(status_)) result.signal = WTERMSIG(status_);
  result.out = out();
  result.err = err();
  return result;
}

Result run(const Command& command, milliseconds timeout) {
  return Process(command).wait(timeout);
}

Ranks::Ranks(std::vector<Command> commands) {
  uint16_t port = 0;
  reserved_port_ = reserve_port(port);
  const auto size = std::to_string(commands.size());
  for (size_t rank = 0; rank < commands.size(); ++rank) {
    auto& command = commands[rank];
    command.env.merge(Environment{{"RANK", std::to_string(rank)},
                                  {"WORLD_SIZE", size},
                                  {"LOCAL_RANK", std::to_string(rank)},
                                  {"LOCAL_WORLD_SIZE", size},
                                  {"MASTER_ADDR", "127.0.0.1"},
                                  {"MASTER_PORT", std::to_string(port)},
                                  {"OMP_NUM_THREADS", "1"}});
    processes_.emplace_back(command);
  }
}

Ranks::Ranks(int n, const std::string& entry, const Environment& env)
    : Ranks(
          std::vector<Command>(static_cast<size_t>(n), at_entry(entry, env))) {
}

std::vector<Result> Ranks::wait(milliseconds timeout) {
  const Deadline deadline(timeout);
  std::vector<Result> results;
  for (auto& process : processes_) {
    results.push_back(process.wait(deadline.remaining()));
  }
  return results;
}

Fd reserve_port(uint16_t& port) {
  Fd fd(checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket"));
  const int on = 1;
  checked(::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on),
          "setsockopt");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  checked(::bind(fd.get(), generic, length), "bind");
  checked(::getsockname(fd.get(), generic, &length), "getsockname");
  port = ::ntohs(address.sin_port);
  return fd;
}

std::set<std::string> shared_memory_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with("vader_segment.") &&
        !name.starts_with("sm_segment.")) {
      names.insert(name);
    }
  }
  return names;
}

TempDir::TempDir() {
  auto name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX")
                  .string();
  if (::mkdtemp(name.data()) == nullptr) checked(-1, "mkdtemp");
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ProcessEntry::ProcessEntry(const char* name, int (*function)()) {
  entries().emplace(name, function);
}

bool run_entry(int argc, char** argv, int& exit_code) {
  if (argc != 3 || std::strcmp(argv[1], kEntryFlag) != 0) return false;
  const auto entry = entries().find(argv[2]);
  if (entry == entries().end()) {
    std::fprintf(stderr, "no LOCKSTEP_PROCESS(%s) in %s\n", argv[2], argv[0]);
    exit_code = 127;
    return true;
  }
  // The parent reads a file; lines should be there when they are written.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  exit_code = entry->second();
  return true;
}

}  // namespace lockstep::test
