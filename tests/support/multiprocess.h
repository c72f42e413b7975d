#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/fd.h"

/// Real processes for tests. Every wait has a deadline, a process that is still
/// there when its owner goes is killed with its process group and reaped, and
/// none survives the thread that started it (start them from the main thread).
namespace lockstep::test {

using std::chrono::milliseconds;
using namespace std::chrono_literals;

/// Variables set on top of the test's own environment.
using Environment = std::map<std::string, std::string>;

/// A program with its arguments; `argv[0]` is looked up in PATH.
struct Command {
  std::vector<std::string> argv;
  Environment env = {};
  std::string directory = {};  ///< empty: the test's own
};

/// The test binary itself at `LOCKSTEP_PROCESS(entry)`.
Command at_entry(const std::string& entry, Environment env = {});

/// How a process ended, and what it wrote.
struct Result {
  int exit_code = -1;      ///< -1 when a signal ended it
  int signal = 0;          ///< the signal that ended it, else 0
  bool timed_out = false;  ///< the deadline passed, so it was killed
  std::string out;
  std::string err;

  [[nodiscard]] bool ok() const { return exit_code == 0 && !timed_out; }
};
std::ostream& operator<<(std::ostream& stream, const Result& result);

/// One running process, in a process group of its own, stdin at end of file.
class Process {
 public:
  explicit Process(const Command& command);
  ~Process();
  Process(Process&&) noexcept;
  Process& operator=(Process&&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  /// What it wrote so far.
  [[nodiscard]] std::string out() const;
  [[nodiscard]] std::string err() const;

  /// Sends a signal to the process alone.
  void signal(int number) const;
  /// Waits until its stdout contains `text`. False when it ended before that
  /// or the deadline passed.
  [[nodiscard]] bool wait_for_output(std::string_view text,
                                     milliseconds timeout = 30s);
  /// Waits for its end; at the deadline it gets SIGTERM, and SIGKILL with its
  /// group two seconds later.
  Result wait(milliseconds timeout = 60s);

 private:
  bool ended_within(milliseconds timeout);
  void end_group();

  pid_t pid_ = -1;
  Fd pidfd_;
  Fd out_;
  Fd err_;
  int status_ = -1;  ///< as from waitpid; -1 while it runs
};

/// Runs a command line to its end.
Result run(const Command& command, milliseconds timeout = 60s);

/// The ranks of a job on this host: each process gets RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR=127.0.0.1, a MASTER_PORT that the
/// kernel picked and that stays reserved, and OMP_NUM_THREADS=1.
class Ranks {
 public:
  /// Rank i runs `commands[i]`.
  explicit Ranks(std::vector<Command> commands);
  /// `n` ranks of the test binary at `entry`.
  Ranks(int n, const std::string& entry, const Environment& env = {});

  [[nodiscard]] Process& operator[](int rank) { return processes_.at(rank); }
  [[nodiscard]] int size() const { return static_cast<int>(processes_.size()); }
  /// Waits for all of them under one deadline. Result i is rank i's.
  std::vector<Result> wait(milliseconds timeout = 60s);

 private:
  Fd reserved_port_;
  std::vector<Process> processes_;
};

/// A port of 127.0.0.1, bound but not listening: others can still bind it with
/// SO_REUSEADDR, nobody gets it by chance.
Fd reserve_port(uint16_t& port);

/// A new empty directory, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const {
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

/// Names in /dev/shm, without those of Open MPI: a test that runs meanwhile may
/// use it.
std::set<std::string> shared_memory_files();

/// Registers a function under a name; see LOCKSTEP_PROCESS.
struct ProcessEntry {
  ProcessEntry(const char* name, int (*function)());
};

/// When the command line is that of `at_entry`, runs the entry: true, and
/// `exit_code` is what it returned.
bool run_entry(int argc, char** argv, int& exit_code);

}  // namespace lockstep::test

/// Defines what a process does that was started at this entry:
/// `LOCKSTEP_PROCESS(name) { ...; return exit_code; }`. At namespace scope.
#define LOCKSTEP_PROCESS(name)                                       \
  static int lockstep_process_##name();                              \
  static const ::lockstep::test::ProcessEntry lockstep_entry_##name{ \
      #name, lockstep_process_##name};                               \
  static int lockstep_process_##name()
