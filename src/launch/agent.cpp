#include "launch/agent.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <tuple>
#include <utility>

#include "lockstep/core/log.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

/// Two SIGINT in less than this are one: `timeout` and terminal wrappers send
/// it to the process and to its group.
constexpr auto kSameInterrupt = 50ms;
/// A process that SIGKILL does not end by then hangs in the kernel.
constexpr auto kKillTime = 10s;
/// How often the end of the workers' child processes is looked for.
constexpr auto kGroupPoll = 20ms;
/// Most that a pipe can hold.
constexpr size_t kPipeBytes = 1024 * 1024;

constexpr int kSignalExit = 128;

}  // namespace

std::string describe(const WorkerExit& exit) {
  if (exit.stopped) return "stopped by " + signal_name(exit.signal);
  if (exit.signal != 0) return "killed by " + signal_name(exit.signal);
  return "exit code " + std::to_string(exit.exit_code);
}

std::vector<int> Outcome::exit_codes() const {
  std::vector<int> codes(exits.size());
  for (const WorkerExit& exit : exits) {
    codes[static_cast<size_t>(exit.local_rank)] = exit.exit_code;
  }
  return codes;
}

Agent::Agent(int workers, const AgentOptions& options)
    : options_(options),
      guard_(static_cast<size_t>(workers)),
      signals_(options.own_process) {
  workers_.reserve(static_cast<size_t>(workers));
}

Agent::~Agent() {
  signal_groups(SIGKILL);
  for (Worker& worker : workers_) {
    if (!worker.reaped) reap(worker);
  }
}

void Agent::start(ProcessSpec spec) {
  ErrorFile error_file;
  spec.environment["TORCHELASTIC_ERROR_FILE"] = error_file.path();
  workers_.push_back({.process = start_process(spec, guard_),
                      .error_file = std::move(error_file)});
}

void Agent::read(Fd fd, Reader reader, const Sink* sink) {
  ::fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  sources_.push_back({std::move(fd), std::move(reader), sink});
}

Outcome Agent::run() {
  if (options_.timeout) time_limit_.emplace(*options_.timeout);
  while (!all_reaped()) {
    wait_for_events();
    check_deadlines();
    if (all_exited()) reap_empty_groups();
  }
  read_rest();
  write_rest();
  if (failing_) find_first_failure();
  return std::move(outcome_);
}

bool Agent::all_exited() const {
  return std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) {
    return w.exited;
  });
}

bool Agent::all_reaped() const {
  return std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) {
    return w.reaped;
  });
}

int Agent::poll_timeout() const {
  std::chrono::milliseconds timeout = all_exited() ? kGroupPoll : 1s;
  for (const auto& deadline : {time_limit_, grace_, killing_}) {
    if (deadline && !deadline->passed()) {
      timeout = std::min(timeout, deadline->remaining());
    }
  }
  return static_cast<int>(timeout.count());
}

void Agent::wait_for_events() {
  std::vector<pollfd> fds = {{signals_.fd(), POLLIN, 0},
                             {grace_ ? -1 : options_.stop_fd, POLLIN, 0}};
  for (const Worker& worker : workers_) {
    if (!worker.exited) fds.push_back({worker.process.pidfd.get(), POLLIN, 0});
  }
  for (const Sink* sink : sinks_) {
    if (sink->pending()) fds.push_back({sink->fd(), POLLOUT, 0});
  }
  std::vector<std::list<Source>::iterator> polled;
  const size_t first_source = fds.size();
  for (auto source = sources_.begin(); source != sources_.end(); ++source) {
    if (source->sink != nullptr && source->sink->full()) continue;
    polled.push_back(source);
    fds.push_back({source->fd.get(), POLLIN, 0});
  }
  if (::poll(fds.data(), fds.size(), poll_timeout()) < 0) return;

  for (size_t i = 0; i < polled.size(); ++i) {
    if (fds[first_source + i].revents != 0 && !read_some(*polled[i])) {
      sources_.erase(polled[i]);
    }
  }
  for (Sink* sink : sinks_) flush(*sink);
  while (const auto signal = signals_.next()) handle_signal(*signal);
  if (fds[1].revents != 0) stop(SIGTERM);
  note_exits();
  if (options_.own_process && ::getpid() == 1) reap_strangers();
}

/// False at the end of the source.
bool Agent::read_some(Source& source) {
  std::array<char, 64 * 1024> buffer;
  const ssize_t size = ::read(source.fd.get(), buffer.data(), buffer.size());
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  source.reader({buffer.data(), size > 0 ? static_cast<size_t>(size) : 0});
  return size > 0;
}

/// What is in the pipes now. A process that left its group may keep them open
/// for ever.
void Agent::read_rest() {
  for (Source& source : sources_) {
    std::array<char, 64 * 1024> buffer;
    for (size_t total = 0; total < kPipeBytes;) {
      const ssize_t size =
          ::read(source.fd.get(), buffer.data(), buffer.size());
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) break;
      source.reader({buffer.data(), static_cast<size_t>(size)});
      total += static_cast<size_t>(size);
    }
    source.reader({});
  }
  sources_.clear();
}

/// When the reader of our output has left, the job is over, as it would be for
/// a program that writes by itself.
void Agent::flush(Sink& sink) {
  const int before = sink.error();
  sink.flush();
  if (sink.error() == before) return;
  if (sink.error() != EPIPE) {
    log::error("the workers' output is lost from here on: " +
               std::generic_category().message(sink.error()));
  } else if (!grace_) {
    outcome_.signal = SIGPIPE;
    stop(SIGTERM);
  }
}

/// Waits for a slow reader of our output, until it takes it or a signal comes.
void Agent::write_rest() {
  for (Sink* sink : sinks_) {
    for (flush(*sink); sink->pending(); flush(*sink)) {
      pollfd fds[] = {{sink->fd(), POLLOUT, 0}, {signals_.fd(), POLLIN, 0}};
      ::poll(fds, 2, -1);
      if (fds[1].revents == 0) continue;
      while (const auto signal = signals_.next()) {
        if (*signal != SIGUSR1 && *signal != SIGUSR2) return;
      }
    }
  }
}

void Agent::handle_signal(int signal) {
  if (signal == SIGUSR1 || signal == SIGUSR2) {
    for (const Worker& worker : workers_) {
      if (!worker.exited) ::kill(worker.process.pid, signal);
    }
  } else if (!grace_) {
    outcome_.signal = signal;
    stop(signal);
  } else if (signal == SIGINT && grace_->elapsed() >= kSameInterrupt &&
             !killing_) {
    kill();
  }
}

void Agent::note_exits() {
  const auto now = Clock::now();
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].exited) continue;
    siginfo_t info = {};
    const auto pid = static_cast<id_t>(workers_[i].process.pid);
    if (::waitid(P_PID, pid, &info, WEXITED | WNOWAIT | WNOHANG) != 0) {
      // The program itself reaped it, so that its status is lost.
      info.si_pid = workers_[i].process.pid;
      info.si_code = CLD_EXITED;
      info.si_status = 1;
    }
    if (info.si_pid != 0) note_exit(static_cast<int>(i), info, now);
  }
  if (failing_) stop(SIGTERM);
}

void Agent::note_exit(int local_rank,
                      const siginfo_t& info,
                      Clock::time_point now) {
  Worker& worker = workers_[static_cast<size_t>(local_rank)];
  worker.exited = true;
  // What it still had to say belongs before the judgement on it.
  for (Source& source : sources_) read_some(source);
  WorkerExit exit = {.local_rank = local_rank,
                     .pid = worker.process.pid,
                     .error = worker.error_file.read()};
  exit.time = exit.error.time.value_or(now);
  if (info.si_code == CLD_EXITED) {
    exit.exit_code = info.si_status;
  } else {
    exit.signal = info.si_status;
    exit.exit_code = kSignalExit + info.si_status;
    exit.stopped = worker.sent == info.si_status;
  }
  const bool asked = worker.sent != 0;
  const bool early = exit.exit_code == 0 && !asked && options_.exited_early &&
                     options_.exited_early(local_rank);
  const bool as_asked = asked && exit.error.message.empty() &&
                        exit.exit_code == kSignalExit + worker.sent;
  exit.failed = early || (exit.exit_code != 0 && !as_asked);
  if (exit.failed && !grace_) failing_ = true;
  outcome_.exits.push_back(std::move(exit));
}

/// The cause may take longer to end than its consequences, while it dumps core
/// for one: only the time of its error tells. Of two ends that were noticed
/// together, a death by a signal is sooner the cause than an exit.
void Agent::find_first_failure() {
  auto& exits = outcome_.exits;
  std::stable_sort(
      exits.begin(), exits.end(), [](const auto& a, const auto& b) {
        return a.time < b.time;
      });
  const auto order = [](const WorkerExit& exit) {
    return std::tuple(!exit.failed,
                      exit.error.consequence,
                      exit.time,
                      exit.signal == 0,
                      exit.local_rank);
  };
  const auto first = std::min_element(
      exits.begin(), exits.end(), [&](const auto& a, const auto& b) {
        return order(a) < order(b);
      });
  const auto place =
      std::find_if(exits.begin(), exits.end(), [](const WorkerExit& exit) {
        return exit.failed;
      });
  outcome_.failure = static_cast<size_t>(place - exits.begin());
  std::rotate(place, first, first + 1);
}

/// As process 1 of a container, orphans of the workers are ours to reap.
void Agent::reap_strangers() {
  siginfo_t info = {};
  while (::waitid(P_ALL, 0, &info, WEXITED | WNOWAIT | WNOHANG) == 0 &&
         info.si_pid != 0) {
    const bool ours =
        std::any_of(workers_.begin(), workers_.end(), [&](const Worker& w) {
          return w.process.pid == info.si_pid;
        });
    if (ours) return;
    ::waitpid(info.si_pid, nullptr, WNOHANG);
    info = {};
  }
}

/// The leaders stay zombies up to here, so that their groups' numbers are not
/// used again.
void Agent::reap_empty_groups() {
  std::vector<pid_t> groups;
  for (const Worker& worker : workers_) {
    if (!worker.reaped) groups.push_back(worker.process.pid);
  }
  const std::vector<pid_t> live = live_groups(groups);
  for (Worker& worker : workers_) {
    if (!worker.reaped &&
        std::find(live.begin(), live.end(), worker.process.pid) == live.end()) {
      reap(worker);
    }
  }
  if (!live.empty()) stop(SIGTERM);
}

void Agent::reap(Worker& worker) {
  ::kill(-worker.process.pid, SIGKILL);
  guard_.forget(worker.process.pid);
  ::waitpid(worker.process.pid, nullptr, 0);
  worker.reaped = true;
}

void Agent::stop(int signal) {
  if (grace_) return;
  grace_.emplace(options_.grace);
  signal_groups(signal);
}

void Agent::kill() {
  killing_.emplace(kKillTime);
  signal_groups(SIGKILL);
}

void Agent::signal_groups(int signal) {
  for (Worker& worker : workers_) {
    if (worker.reaped) continue;
    if (!worker.exited) worker.sent = signal;
    ::kill(-worker.process.pid, signal);
    // One that is stopped (SIGSTOP, SIGTTIN) would not see it.
    if (signal != SIGKILL) ::kill(-worker.process.pid, SIGCONT);
  }
}

void Agent::abandon() {
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (!workers_[i].exited) {
      outcome_.exits.push_back({.local_rank = static_cast<int>(i),
                                .pid = workers_[i].process.pid,
                                .exit_code = kSignalExit + SIGKILL,
                                .signal = SIGKILL,
                                .stopped = true});
    }
    workers_[i].exited = true;
    workers_[i].reaped = true;
  }
}

void Agent::check_deadlines() {
  if (time_limit_ && time_limit_->passed() && !grace_ && !all_exited()) {
    outcome_.timed_out = true;
    stop(SIGTERM);
  }
  if (grace_ && grace_->passed() && !killing_) kill();
  if (killing_ && killing_->passed()) abandon();
}

}  // namespace lockstep::launcher
