#include "lockstep/launch/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <system_error>
#include <thread>
#include <vector>

#include "core/failure.h"
#include "launch/agent.h"
#include "launch/cluster_environment.h"
#include "launch/cpus.h"
#include "launch/error_file.h"
#include "launch/pipe.h"
#include "launch/port.h"
#include "launch/process.h"
#include "launch/worker_env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep {

void ByteReader::read(void* data, size_t size) {
  const std::string_view bytes = view(size);
  bytes.copy(static_cast<char*>(data), size);
}

std::string_view ByteReader::view(size_t size) {
  if (size > bytes_.size()) {
    throw InvalidArgument(
        "an argument of spawn reads more bytes than were written; check its "
        "lockstep::Serializer");
  }
  const std::string_view result = bytes_.substr(0, size);
  bytes_.remove_prefix(size);
  return result;
}

namespace {

using namespace launcher;

/// Tells a process that it is a child: "call:arguments:report:parent", the
/// number of the call of spawn, two descriptors and a process id.
constexpr const char* kMarker = "LOCKSTEP_SPAWN";
/// What a child reports when it has reached the call.
constexpr char kReached = 'R';

struct Child {
  int call = 0;
  int arguments = -1;
  int report = -1;
};

std::optional<Child> read_marker() {
  const char* marker = std::getenv(kMarker);
  if (marker == nullptr) return std::nullopt;
  Child child;
  pid_t parent = 0;
  const int fields = std::sscanf(marker,
                                 "%d:%d:%d:%d",
                                 &child.call,
                                 &child.arguments,
                                 &child.report,
                                 &parent);
  ::unsetenv(kMarker);
  // A program that a child started is not a child.
  if (fields != 4 || parent != ::getppid()) return std::nullopt;
  ::fcntl(child.arguments, F_SETFD, FD_CLOEXEC);
  ::fcntl(child.report, F_SETFD, FD_CLOEXEC);
  return child;
}

const std::optional<Child>& this_child() {
  static const std::optional<Child> child = read_marker();
  return child;
}

/// The rank that a launcher gave this process, if one did. A Slurm batch script
/// has a rank, but no launcher started it.
std::optional<LaunchContext> launched_rank() {
  const auto place = read_cluster_environment();
  if (!place.rank || !place.world_size || place.source == "Slurm job") {
    return std::nullopt;
  }
  return LaunchContext{
      .rank = *place.rank,
      .world_size = *place.world_size,
      .local_rank = place.local_rank.value_or(*place.rank),
      .local_world_size = place.local_world_size.value_or(*place.world_size)};
}

void write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t size = ::write(fd, bytes.data(), bytes.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) {
      throw LaunchError("cannot pass arguments on: " +
                        std::generic_category().message(errno));
    }
    bytes.remove_prefix(static_cast<size_t>(size));
  }
}

std::string read_all(int fd) {
  struct stat status = {};
  ::fstat(fd, &status);
  std::string bytes(static_cast<size_t>(status.st_size), '\0');
  // All children share the descriptor's position.
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t size = ::pread(
        fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (size <= 0) break;
    done += static_cast<size_t>(size);
  }
  return bytes;
}

[[noreturn]] void leave_with_error(const LaunchContext& context,
                                   const std::string& text,
                                   bool consequence = false) {
  // Before the peers hear of it, so that theirs are the later errors.
  record_error(text, consequence);
  const std::string line = "[rank " + std::to_string(context.rank) + '/' +
                           std::to_string(context.world_size) + "] " + text +
                           '\n';
  [[maybe_unused]] const ssize_t size =
      ::write(STDERR_FILENO, line.data(), line.size());
  announce_failure(text);
  std::exit(1);
}

[[noreturn]] void run_child(const Child& child, const detail::SpawnCall& call) {
  const LaunchContext context = launched_rank().value();
  log::set_rank(context.rank, context.world_size);
  write_all(child.report, {&kReached, 1});
  try {
    const std::string bytes = read_all(child.arguments);
    ByteReader reader(bytes);
    const auto signature = Serializer<std::string>::read(reader);
    if (signature != call.signature) {
      throw LaunchError(
          "this process came to another call of spawn than its parent; the "
          "code before the call must take the same way in both");
    }
    const auto arguments = Serializer<std::string>::read(reader);
    call.invoke(context, arguments);
  } catch (const PeerLost& error) {
    leave_with_error(context, error.what(), true);
  } catch (const std::exception& error) {
    leave_with_error(context, error.what());
  } catch (...) {
    leave_with_error(context, "an exception that is not a std::exception");
  }
  std::exit(0);
}

/// This program's file. The link in /proc also works when the file was
/// replaced since, but as a name it says nothing.
std::string own_program() {
  const std::filesystem::path link = "/proc/self/exe";
  std::error_code error;
  const auto target = std::filesystem::read_symlink(link, error);
  return !error && std::filesystem::equivalent(target, link, error) && !error
             ? target.string()
             : link.string();
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) {
    arguments.push_back(argument);
  }
  return arguments;
}

Fd arguments_file(const std::string& signature, const std::string& arguments) {
  ByteWriter writer;
  Serializer<std::string>::write(writer, signature);
  Serializer<std::string>::write(writer, arguments);
  Fd fd(::memfd_create("lockstep-spawn", MFD_CLOEXEC));
  write_all(fd.get(), writer.bytes());
  return fd;
}

/// Lets the signal that stopped the processes do to this one what it would
/// have done without us.
[[noreturn]] void end_by(int signal) {
  ::kill(::getpid(), signal);
  // Still here: the program ignores it.
  throw LaunchError("the processes were stopped by " + signal_name(signal),
                    {.operation = "spawn"},
                    128 + signal);
}

std::string failure_text(const WorkerExit& exit, bool reached) {
  if (!exit.error.message.empty()) return exit.error.message;
  if (reached) return describe(exit);
  return describe(exit) +
         " before it reached this call of spawn; a child runs main again, so "
         "the code before the call must lead there in every process";
}

/// One run of children, from their start to their end.
class Run {
 public:
  Run(const SpawnOptions& options, int call, Fd arguments, int stop_fd)
      : options_(options),
        call_(call),
        arguments_(std::move(arguments)),
        stop_fd_(stop_fd),
        reports_(static_cast<size_t>(options.nprocs)) {}

  void operator()() {
    const Outcome outcome = run_agent();
    if (outcome.failure) throw_failure(outcome.exits[*outcome.failure]);
    if (outcome.signal != 0) end_by(outcome.signal);
    if (outcome.timed_out) {
      throw TimeoutError(
          "the processes were stopped because the time was over; allow more "
          "with SpawnOptions::timeout",
          {.operation = "spawn", .elapsed = options_.timeout});
    }
  }

 private:
  Outcome run_agent() {
    const ReservedPort port = reserve_port("127.0.0.1", 0);
    const Job job = {.local_world_size = options_.nprocs,
                     .master_port = port.port,
                     .run_id = random_run_id()};
    const std::string program = own_program();
    const auto arguments = own_arguments();
    const Environment base = own_environment();
    const int cpus = allowed_cpus();
    const Fd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    Agent agent(options_.nprocs,
                {.grace = options_.grace,
                 .timeout = options_.timeout,
                 .stop_fd = stop_fd_,
                 .exited_early = [this](int rank) {
                   return reports_[static_cast<size_t>(rank)].empty();
                 }});
    for (int rank = 0; rank < options_.nprocs; ++rank) {
      Pipe report = make_pipe();
      ProcessSpec spec = {
          .path = program,
          .argv = arguments,
          .environment = worker_environment(job, rank, base, cpus),
          .in = nothing.get(),
          .inherited = {arguments_.get(), report.write_end.get()}};
      spec.environment[kMarker] = std::to_string(call_) + ':' +
                                  std::to_string(arguments_.get()) + ':' +
                                  std::to_string(report.write_end.get()) + ':' +
                                  std::to_string(::getpid());
      if (rank == 0) pass_on(port, spec);
      agent.start(std::move(spec));
      agent.read(std::move(report.read_end),
                 [text = &reports_[static_cast<size_t>(rank)]](
                     std::string_view bytes) { *text += bytes; });
    }
    return agent.run();
  }

  [[noreturn]] void throw_failure(const WorkerExit& exit) const {
    const int rank = exit.local_rank;
    throw LaunchError(
        "rank " + std::to_string(rank) + " of " +
            std::to_string(options_.nprocs) + " failed: " +
            failure_text(exit, !reports_[static_cast<size_t>(rank)].empty()),
        {.operation = "spawn", .peers = {rank}},
        exit.exit_code != 0 ? exit.exit_code : 1);
  }

  SpawnOptions options_;
  int call_;
  Fd arguments_;
  int stop_fd_;
  std::vector<std::string> reports_;  ///< by rank, empty until it is reached
};

}  // namespace

bool is_spawned_child() {
  return this_child().has_value();
}

/// A run on a thread of its own, which lives as long as its processes: they
/// are killed when the thread that started them ends.
class SpawnContext::State {
 public:
  State(const SpawnOptions& options, int call, Fd arguments)
      : stop_(::eventfd(0, EFD_CLOEXEC)) {
    std::packaged_task<void()> task(
        Run(options, call, std::move(arguments), stop_.get()));
    done_ = task.get_future();
    thread_ = std::thread(std::move(task));
  }

  ~State() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t size =
        ::write(stop_.get(), &one, sizeof(one));
    thread_.join();
  }

  bool join(std::optional<std::chrono::milliseconds> timeout) {
    if (!done_.valid()) return true;
    if (timeout && done_.wait_for(*timeout) != std::future_status::ready) {
      return false;
    }
    done_.get();
    return true;
  }

 private:
  Fd stop_;
  std::future<void> done_;
  std::thread thread_;
};

SpawnContext::SpawnContext() = default;
SpawnContext::SpawnContext(std::unique_ptr<State> state)
    : state_(std::move(state)) {
}
SpawnContext::~SpawnContext() = default;
SpawnContext::SpawnContext(SpawnContext&&) noexcept = default;
SpawnContext& SpawnContext::operator=(SpawnContext&&) noexcept = default;

bool SpawnContext::join(std::optional<std::chrono::milliseconds> timeout) {
  return !state_ || state_->join(timeout);
}

SpawnContext::operator int() {
  join();
  return 0;
}

namespace detail {

SpawnContext spawn(const SpawnOptions& options, const SpawnCall& call) {
  static std::atomic<int> calls{0};
  const int number = ++calls;
  if (options.nprocs < 1) {
    throw InvalidArgument("spawn: nprocs is " + std::to_string(options.nprocs) +
                          "; the number of processes starts at 1");
  }
  if (const auto& child = this_child()) {
    if (number < child->call) return {};
    if (number > child->call) {
      throw InvalidArgument(
          "spawn was called inside a spawned function; start all processes "
          "from the program itself");
    }
    run_child(*child, call);
  }
  if (const auto context = launched_rank()) {
    if (context->rank == 0 && context->world_size != options.nprocs) {
      log::warning("spawn: nprocs is " + std::to_string(options.nprocs) +
                   ", but the launcher started " +
                   std::to_string(context->world_size) +
                   " ranks; the launcher's number counts");
    }
    call.invoke(*context, call.serialize());
    return {};
  }
  need_exit_statuses();
  Fd arguments = arguments_file(call.signature, call.serialize());
  if (!options.join) {
    return SpawnContext(std::make_unique<SpawnContext::State>(
        options, number, std::move(arguments)));
  }
  Run(options, number, std::move(arguments), -1)();
  return {};
}

}  // namespace detail
}  // namespace lockstep
