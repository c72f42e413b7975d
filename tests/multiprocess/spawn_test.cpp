// `lockstep::spawn`: each entry is a program that calls it.
#include "lockstep/launch/spawn.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <stdexcept>

#include "launch_support.h"
#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

struct Point {
  int x = 0;
  double y = 0;
};

/// Not trivially copyable: travels by its own Serializer.
struct Named {
  std::string name;
  int number = 0;
};

void print(const std::string& text) {
  const std::string line = text + '\n';
  [[maybe_unused]] const auto size =
      ::write(STDOUT_FILENO, line.data(), line.size());
}

}  // namespace
}  // namespace lockstep::test

template <>
struct lockstep::Serializer<lockstep::test::Named> {
  static void write(ByteWriter& writer, const test::Named& value) {
    Serializer<std::string>::write(writer, value.name);
    Serializer<int>::write(writer, value.number);
  }
  static test::Named read(ByteReader& reader) {
    auto name = Serializer<std::string>::read(reader);
    return {std::move(name), Serializer<int>::read(reader)};
  }
};

namespace lockstep::test {
namespace {

LOCKSTEP_PROCESS(spawn_arguments) {
  const auto work = [](const LaunchContext& context,
                       const std::string& text,
                       std::string c_string,
                       std::string_view view,
                       Point point,
                       const std::vector<std::string>& words,
                       std::vector<bool> flags,
                       const Named& named,
                       const std::vector<Named>& list) {
    std::string line = std::to_string(context.rank) + '/' +
                       std::to_string(context.world_size) + ' ' +
                       std::to_string(context.local_rank) + '/' +
                       std::to_string(context.local_world_size) + ' ' + text +
                       ' ' + c_string + ' ' + std::string(view) + ' ' +
                       std::to_string(point.x) + ' ';
    for (const auto& word : words) line += word;
    for (const bool flag : flags) line += flag ? " yes" : " no";
    print(line + ' ' + named.name + std::to_string(named.number) + ' ' +
          list.at(1).name + (point.y == 0.5 ? "" : " wrong"));
  };
  return spawn(work,
               {.nprocs = 2},
               // Only the parent's value counts.
               std::string(is_spawned_child() ? "child" : "parent"),
               "c string",
               std::string_view("view and more", 4),
               Point{3, 0.5},
               std::vector<std::string>{"a", "", "bc"},
               std::vector<bool>{true, false},
               Named{"n", 7},
               std::vector<Named>{{"p", 1}, {"q", 2}});
}

TEST(Spawn, ArgumentsArriveByValue) {
  const auto result = run(at_entry("spawn_arguments"));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"0/2 0/2 parent c string view 3 abc yes no n7 q",
                   "1/2 1/2 parent c string view 3 abc yes no n7 q"}));
  EXPECT_EQ(result.err, "");
}

LOCKSTEP_PROCESS(spawn_environment) {
  return spawn(
      [](const LaunchContext&) {
        std::string line;
        for (const char* name : {"RANK",
                                 "WORLD_SIZE",
                                 "LOCAL_RANK",
                                 "MASTER_ADDR",
                                 "TORCHELASTIC_USE_AGENT_STORE"}) {
          line += std::string(std::getenv(name)) + ' ';
        }
        line += std::getenv("LOCKSTEP_MASTER_FD") != nullptr ? "fd" : "none";
        line += std::getenv("LOCKSTEP_SPAWN") != nullptr ? " marker" : "";
        print(line);
      },
      {.nprocs = 2});
}

TEST(Spawn, ProcessesGetTheWorkersVariables) {
  const auto result = run(at_entry("spawn_environment"));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"0 2 0 127.0.0.1 False fd", "1 2 1 127.0.0.1 False none"}));
}

LOCKSTEP_PROCESS(spawn_twice) {
  print(is_spawned_child() ? "before, child" : "before, parent");
  spawn([](const LaunchContext&) { print("first"); });
  if (!is_spawned_child()) print("between");
  spawn(
      [](const LaunchContext& c) { print("second " + std::to_string(c.rank)); },
      {.nprocs = 2});
  print("after");
  return 0;
}

TEST(Spawn, ReachesTheSameCallAgain) {
  const auto result = run(at_entry("spawn_twice"));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"after",
                   "before, child",
                   "before, child",
                   "before, child",
                   "before, parent",
                   "between",
                   "first",
                   "second 0",
                   "second 1"}));
}

// --- failures ----------------------------------------------------------------

/// Prints what a spawn threw.
template <class Call>
int report_error(Call call) {
  try {
    call();
  } catch (const LaunchError& error) {
    print("LaunchError rank " +
          std::to_string(
              error.context().peers.empty() ? -1 : error.context().peers[0]) +
          " code " + std::to_string(error.exit_code()) + ": " + error.what());
    return 0;
  } catch (const Error& error) {
    print(std::string("Error: ") + error.what());
    return 0;
  }
  print("no error");
  return 1;
}

LOCKSTEP_PROCESS(spawn_throws) {
  return report_error([] {
    spawn(
        [](const LaunchContext& context) {
          if (context.rank == 1) throw std::runtime_error("no such file");
          ::sleep(60);
        },
        {.nprocs = 3});
  });
}

TEST(Spawn, AnExceptionReachesTheCallerWithRankAndText) {
  const auto result = run(at_entry("spawn_throws"), 20s);
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(result.out,
            "LaunchError rank 1 code 1: spawn: rank 1 of 3 failed: no such "
            "file\n");
  EXPECT_EQ(result.err, "[rank 1/3] no such file\n");
}

LOCKSTEP_PROCESS(spawn_crashes) {
  return report_error([] {
    spawn(
        [](const LaunchContext& context) {
          if (context.rank == 0) ::raise(SIGSEGV);
          ::sleep(60);
        },
        {.nprocs = 2});
  });
}

TEST(Spawn, ACrashIsNamed) {
  const auto result = run(at_entry("spawn_crashes"), 20s);
  EXPECT_EQ(result.out,
            "LaunchError rank 0 code 139: spawn: rank 0 of 2 failed: killed "
            "by SIGSEGV\n")
      << result;
}

LOCKSTEP_PROCESS(spawn_unreached) {
  if (is_spawned_child()) return 0;
  return report_error([] { spawn([](const LaunchContext&) {}); });
}

TEST(Spawn, AChildThatDoesNotReachTheCallIsAnError) {
  const auto result = run(at_entry("spawn_unreached"), 20s);
  EXPECT_NE(result.out.find("rank 0 of 1 failed: exit code 0 before it reached "
                            "this call of spawn"),
            std::string::npos)
      << result;
}

LOCKSTEP_PROCESS(spawn_other_call) {
  return report_error([] {
    if (is_spawned_child()) {
      spawn([](const LaunchContext&, int) { print("wrong"); }, {}, 1);
    }
    spawn([](const LaunchContext&, double) {}, {}, 1.0);
  });
}

TEST(Spawn, AChildThatReachesAnotherCallIsAnError) {
  const auto result = run(at_entry("spawn_other_call"), 20s);
  EXPECT_NE(result.out.find("another call of spawn than its parent"),
            std::string::npos)
      << result;
  EXPECT_EQ(result.out.find("wrong"), std::string::npos);
}

LOCKSTEP_PROCESS(spawn_other_function) {
  return report_error([] {
    if (is_spawned_child()) {
      spawn([](const LaunchContext&, int) { print("wrong"); }, {}, 1);
    }
    spawn([](const LaunchContext&, int) {}, {}, 1);
  });
}

TEST(Spawn, AChildThatReachesAnotherFunctionIsAnError) {
  const auto result = run(at_entry("spawn_other_function"), 20s);
  EXPECT_NE(result.out.find("another call of spawn than its parent"),
            std::string::npos)
      << result;
  EXPECT_EQ(result.out.find("wrong"), std::string::npos);
}

LOCKSTEP_PROCESS(spawn_without_child_signals) {
  ::signal(SIGCHLD, SIG_IGN);
  return report_error([] { spawn([](const LaunchContext&) {}); });
}

TEST(Spawn, NeedsTheEndsOfItsProcesses) {
  const auto result = run(at_entry("spawn_without_child_signals"), 20s);
  EXPECT_TRUE(result.out.starts_with("Error: this program ignores SIGCHLD"))
      << result;
}

LOCKSTEP_PROCESS(spawn_throws_without_stderr) {
  return report_error([] {
    spawn([](const LaunchContext&) {
      ::close(STDERR_FILENO);
      throw std::runtime_error("the reason");
    });
  });
}

TEST(Spawn, AnErrorArrivesWithoutAWritableStandardError) {
  EXPECT_EQ(run(at_entry("spawn_throws_without_stderr"), 20s).out,
            "LaunchError rank 0 code 1: spawn: rank 0 of 1 failed: the "
            "reason\n");
}

LOCKSTEP_PROCESS(spawn_nested) {
  return report_error([] {
    spawn([](const LaunchContext&) { spawn([](const LaunchContext&) {}); });
  });
}

TEST(Spawn, InsideASpawnedFunctionIsRefused) {
  const auto result = run(at_entry("spawn_nested"), 20s);
  EXPECT_NE(result.out.find("inside a spawned function"), std::string::npos)
      << result;
}

TEST(Spawn, NeedsAProcess) {
  EXPECT_THROW(spawn([](const LaunchContext&) {}, {.nprocs = 0}),
               InvalidArgument);
}

LOCKSTEP_PROCESS(spawn_too_long) {
  return report_error([] {
    spawn([](const LaunchContext&) { ::sleep(60); },
          {.nprocs = 2, .timeout = 300ms});
  });
}

TEST(Spawn, TheTimeoutStopsTheProcesses) {
  const auto result = run(at_entry("spawn_too_long"), 20s);
  EXPECT_TRUE(
      result.out.starts_with("Error: spawn: the processes were stopped "
                             "because the time was over"))
      << result;
}

// --- join = false ------------------------------------------------------------

LOCKSTEP_PROCESS(spawn_without_join) {
  auto job = spawn(
      [](const LaunchContext& context) {
        std::this_thread::sleep_for(500ms);
        print("end " + std::to_string(context.rank));
      },
      {.nprocs = 2, .join = false});
  print(job.join(1ms) ? "ended" : "runs");
  print(job.join() && job.join(0ms) ? "ended" : "runs");
  return 0;
}

TEST(SpawnContext, JoinWaitsAsLongAsItIsTold) {
  const auto result = run(at_entry("spawn_without_join"), 20s);
  const auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 4u) << result;
  EXPECT_EQ(lines.front(), "runs");
  EXPECT_EQ(lines.back(), "ended");
}

LOCKSTEP_PROCESS(spawn_dropped) {
  {
    const auto job = spawn([](const LaunchContext&) { ::sleep(60); },
                           {.nprocs = 2, .join = false});
    std::this_thread::sleep_for(100ms);
  }
  print("stopped");
  return 0;
}

TEST(SpawnContext, TheDestructorStopsTheProcesses) {
  EXPECT_EQ(run(at_entry("spawn_dropped"), 20s).out, "stopped\n");
}

LOCKSTEP_PROCESS(spawn_stops_slowly) {
  {
    const auto job = spawn(
        [](const LaunchContext&) {
          ::signal(SIGTERM, SIG_IGN);
          print("ready");
          ::sleep(60);
        },
        {.join = false, .grace = 1500ms});
    ::sleep(1);
  }
  const double seconds = double(std::clock()) / CLOCKS_PER_SEC;
  print(seconds < 0.5 ? "waited" : "spun for " + std::to_string(seconds));
  return 0;
}

TEST(SpawnContext, WaitsForTheGraceTimeWithoutUsingTheCpu) {
  EXPECT_EQ(run(at_entry("spawn_stops_slowly"), 20s).out, "ready\nwaited\n");
}

// --- other launchers ---------------------------------------------------------

LOCKSTEP_PROCESS(spawn_place) {
  const pid_t caller = ::getpid();
  return spawn(
      [caller](const LaunchContext& context, int number) {
        print(
            std::to_string(context.rank) + " of " +
            std::to_string(context.world_size) + ' ' + std::to_string(number) +
            (::getpid() == caller && !is_spawned_child() ? " here" : " child"));
      },
      {.nprocs = 4},
      5);
}

TEST(SpawnUnderALauncher, RunsHereAsItsRank) {
  EXPECT_EQ(
      run(at_entry("spawn_place", {{"RANK", "1"}, {"WORLD_SIZE", "2"}})).out,
      "1 of 2 5 here\n");
  EXPECT_EQ(run(at_entry("spawn_place",
                         {{"OMPI_COMM_WORLD_RANK", "2"},
                          {"OMPI_COMM_WORLD_SIZE", "3"}}))
                .out,
            "2 of 3 5 here\n");
  auto arguments = at_entry("spawn_place").argv;
  arguments.insert(arguments.begin(), {"-n", "2"});
  EXPECT_EQ(sorted_lines(run(lockstep_run(arguments)).out),
            (Lines{"[rank 0]: 0 of 2 5 here", "[rank 1]: 1 of 2 5 here"}));
}

TEST(SpawnUnderALauncher, WarnsOnceWhenItsNumberIsAnother) {
  const auto err = [](const char* rank, const char* size) {
    return run(at_entry("spawn_place", {{"RANK", rank}, {"WORLD_SIZE", size}}))
        .err;
  };
  EXPECT_NE(err("0", "2").find("nprocs is 4, but the launcher started 2 ranks"),
            std::string::npos);
  EXPECT_EQ(err("1", "2"), "");
  EXPECT_EQ(err("0", "4"), "");
}

TEST(SpawnUnderALauncher, ABatchScriptOfSlurmIsNone) {
  const auto result = run(
      at_entry("spawn_place", {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}}));
  EXPECT_EQ(lines_of(result.out).size(), 4u) << result;
}

LOCKSTEP_PROCESS(spawn_beside_own_child) {
  const pid_t own = is_spawned_child() ? -1 : ::fork();
  if (own == 0) ::_exit(7);
  spawn([](const LaunchContext&) { std::this_thread::sleep_for(300ms); });
  int status = 0;
  print(::waitpid(own, &status, 0) == own ? std::to_string(WEXITSTATUS(status))
                                          : "lost");
  return 0;
}

TEST(SpawnAsProcessOne, LeavesItsOtherChildrenToTheProgram) {
  const std::vector<std::string> as_one = {
      "unshare", "--pid", "--fork", "--mount-proc"};
  auto command = as_one;
  command.emplace_back("true");
  if (!run({.argv = command}).ok()) GTEST_SKIP() << "unshare is not permitted";
  command = at_entry("spawn_beside_own_child").argv;
  command.insert(command.begin(), as_one.begin(), as_one.end());
  EXPECT_EQ(run({.argv = command}, 20s).out, "7\n");
}

// --- signals and deaths ------------------------------------------------------

LOCKSTEP_PROCESS(spawn_grandchildren) {
  return spawn(
      [](const LaunchContext&) {
        const std::string tag = std::getenv("SPAWN_TAG");
        ::signal(SIGTERM, SIG_IGN);
        print("ready");
        std::exit(std::system(("sleep 60; : " + tag).c_str()));
      },
      {.nprocs = 2, .grace = 500ms});
}

class SpawnStop : public testing::TestWithParam<int> {};

TEST_P(SpawnStop, EndsTheWholeTree) {
  const int signal = GetParam();
  const std::string tag = unique_tag();
  Process parent(at_entry("spawn_grandchildren", {{"SPAWN_TAG", tag}}));
  ASSERT_TRUE(parent.wait_for_output("ready\nready"));
  const Deadline deadline(20s);
  while (processes_with(tag) < 2 && !deadline.passed()) {
    std::this_thread::sleep_for(5ms);
  }
  parent.signal(signal);
  const auto result = parent.wait(10s);
  EXPECT_EQ(result.signal, signal) << result;
  EXPECT_TRUE(all_gone(tag, 2s));
}

INSTANTIATE_TEST_SUITE_P(All,
                         SpawnStop,
                         testing::Values(SIGINT, SIGTERM, SIGKILL));

}  // namespace
}  // namespace lockstep::test
