// The mpi backend under mpirun: how a job starts and what becomes of it when a
// rank is lost. The table of the collectives runs there, too: see CMakeLists.

#include <gtest/gtest.h>
#include <mpi.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/backends/mpi/mpi_backend.h"
#include "core/clock.h"
#include "core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/testing/run_ranks.h"
#include "support/multiprocess.h"

namespace lockstep::test {
namespace {

/// `argv` as each of n ranks.
Command mpirun(int n,
               std::vector<std::string> argv,
               Environment env = {},
               const std::vector<std::string>& options = {}) {
  Command command = {.argv = {LOCKSTEP_MPIRUN, "-n", std::to_string(n)},
                     .env = std::move(env)};
  for (const char* word : {"--oversubscribe", "--bind-to", "none"}) {
    command.argv.emplace_back(word);
  }
  command.argv.insert(command.argv.end(), options.begin(), options.end());
  command.argv.insert(command.argv.end(), argv.begin(), argv.end());
  command.env["OMPI_ALLOW_RUN_AS_ROOT"] = "1";
  command.env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1";
  command.env["OMP_NUM_THREADS"] = "1";
  return command;
}

Command mpirun_entry(int n,
                     const std::string& entry,
                     const Environment& env = {},
                     const std::vector<std::string>& options = {}) {
  return mpirun(n, at_entry(entry).argv, env, options);
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++n;
  }
  return n;
}

bool is_rank_of(const char* variable) {
  return env::get_int(variable) == get_rank();
}

double processor_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) *
             1e-6;
}

/// Prints a line at once: mpirun passes on whole ones.
void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void check_sum() {
  auto tensor = torch::full({1000}, get_rank() + 1.0);
  all_reduce(tensor);
  const int n = get_world_size();
  if (!tensor.equal(torch::full({1000}, n * (n + 1) / 2.0))) std::abort();
}

// --- Start

/// What init says about a place that MPI does not agree with.
LOCKSTEP_PROCESS(mpi_init_fails) {
  if (const auto rank = env::get("OMPI_COMM_WORLD_RANK")) {
    if (env::get("SWAP")) ::setenv("RANK", *rank == "0" ? "1" : "0", 1);
  }
  try {
    init_process_group({.backend = "mpi"});
    return 1;
  } catch (const InvalidArgument& error) {
    say(error.what());
    return 0;
  }
}

TEST(MpiStart, AnotherSizeThanThatOfMpiIsRefused) {
  const auto result = run(
      mpirun_entry(2, "mpi_init_fails", {{"RANK", "0"}, {"WORLD_SIZE", "3"}}));
  EXPECT_EQ(count(result.out,
                  "world_size is 3 by RANK and WORLD_SIZE but 2 by "
                  "MPI_COMM_WORLD"),
            1)
      << result;
}

TEST(MpiStart, AnotherRankThanThatOfMpiIsRefused) {
  const auto result = run(
      mpirun_entry(2, "mpi_init_fails", {{"SWAP", "1"}, {"WORLD_SIZE", "2"}}));
  EXPECT_TRUE(result.ok()) << result;
  for (const char* text :
       {"rank is 1 by RANK and WORLD_SIZE but 0 by MPI_COMM_WORLD",
        "rank is 0 by RANK and WORLD_SIZE but 1 by MPI_COMM_WORLD"}) {
    EXPECT_EQ(count(result.out, text), 1) << result;
  }
}

TEST(MpiStart, RanksThatMpirunDidNotStartAreRefused) {
  Ranks ranks(2, "mpi_init_fails");
  for (const auto& result : ranks.wait()) {
    EXPECT_TRUE(result.ok()) << result;
    EXPECT_NE(result.out.find("a process that mpirun did not start is alone"),
              std::string::npos)
        << result;
  }
}

/// Threads of one process cannot be ranks of MPI.
LOCKSTEP_PROCESS(mpi_threads_as_ranks) {
  try {
    testing::run_ranks(2, [](int) {}, {.backend = "mpi"});
    return 1;
  } catch (const InvalidArgument& error) {
    say(error.what());
    return 0;
  }
}

TEST(MpiStart, ThreadsAsRanksAreRefused) {
  const auto result = run(at_entry("mpi_threads_as_ranks"));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_NE(result.out.find("ranks 0 and 1 are both rank 0 of MPI_COMM_WORLD; "
                            "start all ranks as processes of one job"),
            std::string::npos)
      << result;
}

LOCKSTEP_PROCESS(mpi_own_init) {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, std::atoi(std::getenv("LEVEL")), &level);
  try {
    for (int round = 0; round < 2; ++round) {
      init_process_group({.backend = "mpi"});
      check_sum();
      destroy_process_group();
    }
    say("summed");
  } catch (const InvalidArgument& error) {
    say(error.what());
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  MPI_Finalize();
  return finalized;
}

TEST(MpiStart, AnMpiThatTheProgramInitialisedIsUsedAndLeftToIt) {
  const auto result = run(mpirun_entry(
      2, "mpi_own_init", {{"LEVEL", std::to_string(MPI_THREAD_SERIALIZED)}}));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(count(result.out, "summed"), 2) << result;
}

TEST(MpiStart, AnMpiWithoutThreadsIsRefused) {
  const auto result = run(mpirun_entry(
      2, "mpi_own_init", {{"LEVEL", std::to_string(MPI_THREAD_FUNNELED)}}));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(count(result.out,
                  "MPI was initialised with MPI_THREAD_FUNNELED, and "
                  "MPI_THREAD_SERIALIZED is needed"),
            2)
      << result;
}

/// Nothing but MPI itself tells this process where it is.
LOCKSTEP_PROCESS(mpi_without_variables) {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  std::vector<std::string> names;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string name(*variable, std::strchr(*variable, '='));
    if (name.starts_with("OMPI_") || name.starts_with("PM")) {
      names.push_back(name);
    }
  }
  for (const auto& name : names) ::unsetenv(name.c_str());
  init_process_group({.backend = "mpi"});
  check_sum();
  say("rank " + std::to_string(get_rank()) + " of " +
      std::to_string(get_world_size()));
  destroy_process_group();
  MPI_Finalize();
  return 0;
}

TEST(MpiStart, MpiAloneIsEnough) {
  const auto result = run(mpirun_entry(3, "mpi_without_variables"));
  EXPECT_TRUE(result.ok()) << result;
  for (const char* line : {"rank 0 of 3\n", "rank 1 of 3\n", "rank 2 of 3\n"}) {
    EXPECT_EQ(count(result.out, line), 1) << result;
  }
}

/// Ends without destroy_process_group.
LOCKSTEP_PROCESS(mpi_sum) {
  init_process_group();
  check_sum();
  say(get_backend() + " summed");
  return 0;
}

TEST(MpiStart, TheVariableChoosesItAndTheEndOfTheProcessIsEnough) {
  const auto result =
      run(mpirun_entry(3, "mpi_sum", {{"LOCKSTEP_BACKEND", "mpi"}}));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(count(result.out, "mpi summed\n"), 3) << result;
}

// --- Messages

LOCKSTEP_PROCESS(mpi_long_messages) {
  comm::mpi::set_longest_part(1000);
  init_process_group({.backend = "mpi"});
  const int n = get_world_size();
  for (const int64_t numel : {250, 251, 1 << 18}) {
    const auto input = [&](int rank) {
      return (torch::arange(numel) * 3 + rank).to(torch::kFloat);
    };
    auto sum = input(get_rank());
    all_reduce(sum);
    auto expected = input(0);
    for (int rank = 1; rank < n; ++rank) expected += input(rank);
    if (!sum.equal(expected)) return 1;
    std::vector<at::Tensor> gathered;
    for (int rank = 0; rank < n; ++rank) gathered.push_back(input(0));
    all_gather(gathered, input(get_rank()));
    for (int rank = 0; rank < n; ++rank) {
      if (!gathered[rank].equal(input(rank))) return 2;
    }
  }
  destroy_process_group();
  return 0;
}

TEST(MpiMessages, LongOnesGoInParts) {
  const auto result = run(mpirun_entry(3, "mpi_long_messages"));
  EXPECT_TRUE(result.ok()) << result;
}

/// Rank 1 comes late to an all_reduce.
LOCKSTEP_PROCESS(mpi_wait_for_one) {
  init_process_group({.backend = "mpi"});
  barrier();
  if (is_rank_of("LATE")) std::this_thread::sleep_for(3s);
  const double before = processor_seconds();
  check_sum();
  const double used = processor_seconds() - before;
  if (!is_rank_of("LATE")) say("used " + std::to_string(used) + " s");
  destroy_process_group();
  return 0;
}

TEST(MpiMessages, WaitingLeavesTheProcessorToOthers) {
  const auto result = run(mpirun_entry(2, "mpi_wait_for_one", {{"LATE", "1"}}));
  ASSERT_TRUE(result.ok()) << result;
  const auto at = result.out.find("used ");
  ASSERT_NE(at, std::string::npos) << result;
  EXPECT_LT(std::stod(result.out.substr(at + 5)), 0.1) << result;
}

// --- Groups

at::Tensor sum_in(const ProcessGroup& group) {
  auto tensor = torch::full({1000}, get_rank() + 1.0);
  all_reduce(tensor, {.group = group});
  return tensor;
}

/// Rank 3 comes late to a call of two, which ends that group alone.
LOCKSTEP_PROCESS(mpi_groups) {
  init_process_group({.backend = "mpi"});
  const int rank = get_rank();
  const auto even = new_group({0, 2});
  const auto last = new_group({1, 2, 3});
  const auto late = new_group({1, 3}, {.timeout = 500ms});
  auto everywhere = torch::full({1000}, rank + 1.0);
  const auto work = all_reduce(everywhere, {.async_op = true});
  bool right = get_backend(last) == (rank == 0 ? "" : "mpi");
  if (even.is_member()) right &= sum_in(even).equal(torch::full({1000}, 4.0));
  if (last.is_member()) right &= sum_in(last).equal(torch::full({1000}, 9.0));
  work.wait();
  right &= everywhere.equal(torch::full({1000}, 10.0));
  destroy_process_group(even);
  if (rank == 3) std::this_thread::sleep_for(1s);
  if (late.is_member()) {
    try {
      sum_in(late);
      right = false;
    } catch (const TimeoutError& error) {
      right &= error.context().peers == std::vector<int>{3};
    } catch (const Error&) {
      right &= rank == 3;  // it learns that the other has given up
    }
  }
  check_sum();
  const auto again = new_group({1, 3});
  if (again.is_member()) right &= sum_in(again).equal(torch::full({1000}, 6.0));
  check_sum();
  destroy_process_group();
  return right ? 0 : 1;
}

TEST(MpiGroups, OfSomeRanksEndAlone) {
  const auto result = run(mpirun_entry(4, "mpi_groups"));
  EXPECT_TRUE(result.ok()) << result;
}

// --- Lost ranks

constexpr auto kTimeout = 2000ms;

void report(const char* kind, const Error& error) {
  std::string line = kind;
  for (const int peer : error.context().peers) {
    line += ' ' + std::to_string(peer);
  }
  say(line + " on " + std::to_string(get_rank()) + '.');
  std::fprintf(stderr, "%s\n", error.what());
}

/// Reduces 1 MB again and again and says how that ended.
LOCKSTEP_PROCESS(mpi_reduce_for_ever) {
  init_process_group({.backend = "mpi"});
  get_group()->getBackend(at::kCPU)->setTimeout(kTimeout);
  say("rank " + std::to_string(get_rank()) + " pid " +
      std::to_string(::getpid()) + '.');
  int exit_code = 1;
  try {
    auto tensor = torch::ones(1 << 18);
    for (int i = 0;; ++i) {
      all_reduce(tensor, {.op = ReduceOp::AVG});
      if (i == 3) say("running " + std::to_string(get_rank()) + '.');
    }
  } catch (const PeerLost& error) {
    report("lost", error);
    exit_code = 0;
  } catch (const TimeoutError& error) {
    report("timeout", error);
    exit_code = 0;
  }
  try {
    barrier();
    exit_code = 2;
  } catch (const Error&) {
  }
  destroy_process_group();
  return exit_code;
}

/// A job of three ranks that are under way.
class Job {
 public:
  explicit Job(const std::vector<std::string>& options)
      : process_(mpirun_entry(3, "mpi_reduce_for_ever", {}, options)) {
    for (int rank = 0; rank < 3; ++rank) {
      const auto text = std::to_string(rank);
      if (!process_.wait_for_output("running " + text + ".\n")) {
        ADD_FAILURE() << process_.wait(0ms);
        return;
      }
      const auto out = process_.out();
      const std::string start = "rank " + text + " pid ";
      pids_.push_back(std::stoi(out.substr(out.find(start) + start.size())));
    }
  }

  [[nodiscard]] bool runs() const { return pids_.size() == 3; }
  void signal(int rank, int number) const { ::kill(pids_[rank], number); }
  Process& process() { return process_; }

  /// Whether the ranks have ended, or do so in a moment.
  [[nodiscard]] bool is_gone(const std::vector<int>& ranks = {0, 1, 2}) const {
    const Deadline deadline(10s);
    for (const int rank : ranks) {
      while (::kill(pids_[rank], 0) == 0) {
        if (deadline.passed()) return false;
        std::this_thread::sleep_for(10ms);
      }
    }
    return true;
  }

 private:
  Process process_;
  std::vector<int> pids_;
};

TEST(LostMpiPeer, AKillIsNamedWithinTwoSecondsWhereMpirunLetsOthersLive) {
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const int victim = round % 3;
    Job job({"--enable-recovery"});
    ASSERT_TRUE(job.runs());
    std::this_thread::sleep_for(round * 7ms);
    job.signal(victim, SIGKILL);
    const Deadline deadline(2s);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(job.process().wait_for_output(
          "lost " + std::to_string(victim) + " on " + std::to_string(rank) +
              ".\n",
          deadline.remaining()))
          << job.process().out() << job.process().err();
    }
    const auto result = job.process().wait(20s);
    EXPECT_FALSE(result.timed_out) << result;
    EXPECT_TRUE(job.is_gone()) << result;
  }
}

TEST(LostMpiPeer, AKillUnderPlainMpirunEndsTheJob) {
  const auto before = shared_memory_files();
  for (int victim = 0; victim < 3; ++victim) {
    Job job({});
    ASSERT_TRUE(job.runs());
    job.signal(victim, SIGKILL);
    const auto result = job.process().wait(20s);
    EXPECT_FALSE(result.timed_out) << result;
    EXPECT_NE(result.exit_code, 0) << result;
    EXPECT_TRUE(job.is_gone()) << result;
  }
  EXPECT_EQ(shared_memory_files(), before);
}

TEST(LostMpiPeer, OneThatIsStoppedIsNamedAtTheDeadlineAndNotWaitedFor) {
  Job job({"--enable-recovery"});
  ASSERT_TRUE(job.runs());
  job.signal(1, SIGSTOP);
  const Deadline deadline(kTimeout + 2s);
  for (const char* line : {"timeout 1 on 0.\n", "timeout 1 on 2.\n"}) {
    EXPECT_TRUE(job.process().wait_for_output(line, deadline.remaining()))
        << job.process().out() << job.process().err();
  }
  EXPECT_TRUE(job.is_gone({0, 2})) << "they wait for it as they end";
  job.signal(1, SIGKILL);
  const auto result = job.process().wait(20s);
  EXPECT_FALSE(result.timed_out) << result;
  EXPECT_TRUE(job.is_gone()) << result;
}

/// Rank LEAVER leaves before a call that the others make.
LOCKSTEP_PROCESS(mpi_call_without_one_rank) {
  init_process_group({.backend = "mpi"});
  barrier();
  if (is_rank_of("LEAVER")) {
    destroy_process_group();
    return 0;
  }
  std::this_thread::sleep_for(milliseconds(*env::get_int("PAUSE")));
  try {
    check_sum();
    return 1;
  } catch (const PeerLost& error) {
    report("lost", error);
  }
  return 0;
}

TEST(LostMpiPeer, OneThatLeftIsNamedWheneverTheOthersCall) {
  for (const char* check : {"1", "0"}) {
    for (const char* pause : {"0", "1500"}) {
      SCOPED_TRACE(std::string(check) + ' ' + pause);
      const auto result = run(mpirun_entry(
          3,
          "mpi_call_without_one_rank",
          {{"LEAVER", "1"}, {"PAUSE", pause}, {"LOCKSTEP_CHECK", check}}));
      for (const char* line : {"lost 1 on 0.\n", "lost 1 on 2.\n"}) {
        EXPECT_EQ(count(result.out, line), 1) << result;
      }
      EXPECT_FALSE(result.timed_out) << result;
    }
  }
}

/// Cases of the conformance suite in which a rank ends with an error. mpirun
/// takes that for a failure of the job.
TEST(LostMpiPeer, AFailureIsToldToTheOthers) {
  for (const char* name : {"*ARankMayFailAsSoonAsItHasJoined*",
                           "*AFailedRankIsNamedByTheOthers*"}) {
    const auto result = run(mpirun(3,
                                   {LOCKSTEP_CONFORMANCE,
                                    std::string("--gtest_filter=") + name,
                                    "--gtest_color=no"},
                                   {},
                                   {"--enable-recovery"}));
    EXPECT_FALSE(result.timed_out) << result;
    EXPECT_EQ(count(result.out, "[  PASSED  ] 1 test."), 3) << result;
  }
}

}  // namespace
}  // namespace lockstep::test
