#pragma once

#include <signal.h>

#include <chrono>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/clock.h"
#include "core/fd.h"
#include "launch/error_file.h"
#include "launch/guard.h"
#include "launch/output.h"
#include "launch/process.h"
#include "launch/signals.h"

namespace lockstep::launcher {

struct AgentOptions {
  /// This process is the launcher's own, not a program that calls it: orphans
  /// that it gets as process 1 are reaped, and see `SignalRelay`.
  bool own_process = false;
  /// Time between asking the workers to stop and killing them.
  std::chrono::milliseconds grace = std::chrono::seconds(30);
  /// Stops the job when it is over. Unset: no bound.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Readable: stop the job. Borrowed; -1 for none.
  int stop_fd = -1;
  /// Whether a worker that exited with 0 failed nevertheless.
  std::function<bool(int local_rank)> exited_early = {};
};

/// How one worker ended.
struct WorkerExit {
  int local_rank = 0;
  pid_t pid = -1;
  int exit_code = 0;     ///< its own, or 128 + signal
  int signal = 0;        ///< that ended it
  bool stopped = false;  ///< the signal was the agent's
  bool failed = false;   ///< of its own accord
  RecordedError error = {};
  Clock::time_point time = {};  ///< of its error, else of its end
};

/// "exit code 3", "killed by SIGSEGV", "stopped by SIGTERM".
std::string describe(const WorkerExit& exit);

/// How the job ended.
struct Outcome {
  std::vector<WorkerExit> exits;  ///< in order of time
  int signal = 0;                 ///< to this process, that stopped the job
  bool timed_out = false;
  /// Index in `exits` of the failure that stopped the job: the earliest that is
  /// not a consequence of another.
  std::optional<size_t> failure = {};

  /// Exit codes by local rank.
  [[nodiscard]] std::vector<int> exit_codes() const;
};

/// Starts the workers of this node and watches over them to their end: output,
/// signals, failures, grace time.
class Agent {
 public:
  /// Takes the bytes that arrive from a worker; none at the end.
  using Reader = std::function<void(std::string_view)>;

  Agent(int workers, const AgentOptions& options);
  /// Kills what is left.
  ~Agent();

  /// Starts the next local rank and gives it an error file. Throws LaunchError
  /// when it cannot be executed; workers that were started before are killed by
  /// the destructor.
  void start(ProcessSpec spec);
  /// Reads `fd` to its end in `run`, while `sink`, if any, has room.
  void read(Fd fd, Reader reader, const Sink* sink = nullptr);
  /// Writes what is pending in `sink` in `run`. Borrowed.
  void write(Sink& sink) { sinks_.push_back(&sink); }

  /// Blocks until every worker and every process of its group is gone and all
  /// output is written. Call once, on the thread that called `start`.
  Outcome run();

 private:
  struct Worker {
    Process process;
    ErrorFile error_file;
    bool exited = false;
    bool reaped = false;
    int sent = 0;  ///< the last signal that the agent sent to stop it
  };
  struct Source {
    Fd fd;
    Reader reader;
    const Sink* sink;
  };

  bool all_exited() const;
  bool all_reaped() const;
  void wait_for_events();
  int poll_timeout() const;
  static bool read_some(Source& source);
  void flush(Sink& sink);
  void read_rest();
  void write_rest();
  void handle_signal(int signal);
  void note_exits();
  void note_exit(int local_rank, const siginfo_t& info, Clock::time_point now);
  void find_first_failure();
  void reap_strangers();
  void reap_empty_groups();
  void reap(Worker& worker);
  void stop(int signal);
  void kill();
  void signal_groups(int signal);
  void abandon();
  void check_deadlines();

  AgentOptions options_;
  Guard guard_;
  SignalRelay signals_;
  std::vector<Worker> workers_;
  std::list<Source> sources_;
  std::vector<Sink*> sinks_;
  Outcome outcome_;
  std::optional<Deadline> time_limit_;
  bool failing_ = false;             ///< a failure stopped the job
  std::optional<Deadline> grace_;    ///< runs since the workers must stop
  std::optional<Deadline> killing_;  ///< runs since they were killed
};

}  // namespace lockstep::launcher
