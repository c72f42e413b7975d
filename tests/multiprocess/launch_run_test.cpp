// `lockstep run`: what workers get, what comes out, and exit codes.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>

#include "launch/cpus.h"
#include "launch_support.h"

namespace lockstep::test {
namespace {

TEST(LaunchRun, WorkersGetTorchrunsVariables) {
  const auto result = run(run_shell(
      2,
      "echo $RANK $LOCAL_RANK $WORLD_SIZE "
      "$LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_RANK "
      "$ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT "
      "$TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_USE_AGENT_STORE "
      "$TORCH_NCCL_ASYNC_ERROR_HANDLING; test $MASTER_PORT -gt 0 && test -n "
      "$TORCHELASTIC_RUN_ID"));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"[rank 0]: 0 0 2 2 0 1 0 2 default 127.0.0.1 0 0 False 1",
                   "[rank 1]: 1 1 2 2 0 1 1 2 default 127.0.0.1 0 0 False 1"}));
  EXPECT_EQ(result.err, "");
}

TEST(LaunchRun, StaticNodesNumberTheirRanksInOrder) {
  uint16_t port = 0;
  const Fd held = reserve_port(port);
  const std::string script =
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE "
      "$GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT";
  const auto result = run(lockstep_run({"--nnodes",
                                        "3",
                                        "--node_rank=2",
                                        "--master-addr",
                                        "127.0.0.1",
                                        "--master_port",
                                        std::to_string(port),
                                        "--nproc_per_node",
                                        "1",
                                        "sh",
                                        "-c",
                                        script}));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(result.out,
            "[rank 2]: 2/3 0/1 2/3 127.0.0.1:" + std::to_string(port) + "\n");
}

TEST(LaunchRun, SeveralProgramsShareOneWorld) {
  const auto result = run(lockstep_run({"-n",
                                        "1",
                                        "sh",
                                        "-c",
                                        "echo first $RANK of $WORLD_SIZE",
                                        ":",
                                        "-n",
                                        "2",
                                        "sh",
                                        "-c",
                                        "echo second $RANK of $WORLD_SIZE"}));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"[rank 0]: first 0 of 3",
                   "[rank 1]: second 1 of 3",
                   "[rank 2]: second 2 of 3"}));
}

TEST(LaunchRun, PythonScriptsRunUnderPython) {
  const TempDir directory;
  std::ofstream(directory / "script.py")
      << "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n";
  const auto result =
      run(lockstep_run({directory / "script.py", "--epochs", "2"}));
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(result.out, "0 ['--epochs', '2']\n");
}

TEST(LaunchRun, NoPythonExecutesTheScriptItself) {
  const TempDir directory;
  std::ofstream(directory / "script.py") << "#!/bin/sh\necho shell\n";
  ::chmod((directory / "script.py").c_str(), 0755);
  const auto result =
      run(lockstep_run({"--no-python", directory / "script.py"}));
  EXPECT_EQ(result.out, "shell\n") << result;
}

TEST(LaunchRun, ThreadsAreSharedUnlessTheUserChose) {
  const auto threads = [](const std::string& cpus, int workers) {
    auto command = run_shell(workers, "echo $OMP_NUM_THREADS");
    command.argv.insert(
        command.argv.begin(),
        {"env", "-u", "OMP_NUM_THREADS", "taskset", "-c", cpus});
    return sorted_lines(run(command).out);
  };
  cpu_set_t mask;
  ::sched_getaffinity(0, sizeof(mask), &mask);
  std::vector<std::string> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(std::to_string(cpu));
  }
  if (cpus.size() < 2 || launcher::cpu_quota() < 2) GTEST_SKIP() << "one CPU";
  const auto two = cpus[0] + ',' + cpus[1];
  EXPECT_EQ(threads(cpus[0], 1), Lines{"1"});
  EXPECT_EQ(threads(cpus[0], 2), (Lines{"[rank 0]: 1", "[rank 1]: 1"}));
  EXPECT_EQ(threads(two, 1), Lines{"2"});
  EXPECT_EQ(threads(two, 2), (Lines{"[rank 0]: 1", "[rank 1]: 1"}));
  EXPECT_EQ(
      run(run_shell(1, "echo $OMP_NUM_THREADS", {{"OMP_NUM_THREADS", "7"}}))
          .out,
      "7\n");
}

TEST(LaunchRun, LinesOfSeveralRanksAreNeverTorn) {
  constexpr int kLines = 2000;
  const auto result = run(run_shell(
      4,
      "i=0; while [ $i -lt " + std::to_string(kLines) +
          " ]; do printf %s \"rank=$RANK \"; echo \"line=$i end\"; i=$((i + "
          "1)); done"));
  EXPECT_TRUE(result.ok());
  std::vector<int> next(4, 0);
  const auto lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 4u * kLines);
  for (const std::string& line : lines) {
    const auto rank = static_cast<size_t>(line.at(6) - '0');
    ASSERT_EQ(line,
              "[rank " + std::to_string(rank) +
                  "]: rank=" + std::to_string(rank) +
                  " line=" + std::to_string(next.at(rank)) + " end");
    ++next[rank];
  }
}

TEST(LaunchRun, AnUnfinishedLastLineIsPassedOn) {
  EXPECT_EQ(run(run_shell(1, "printf 'no newline'")).out, "no newline\n");
  const auto result = run(run_shell(2, "printf 'no newline' >&2"));
  EXPECT_EQ(lines_of(result.err).size(), 2u) << result;
}

TEST(LaunchRun, StandardInputGoesToRankZero) {
  auto command = run_shell(2, "cat; echo end");
  std::string line;
  for (const std::string& word : command.argv) line += " '" + word + "'";
  const auto result = run({.argv = {"sh", "-c", "echo text |" + line}});
  EXPECT_EQ(sorted_lines(result.out),
            (Lines{"[rank 0]: end", "[rank 0]: text", "[rank 1]: end"}));
}

TEST(LaunchRun, ALeftOverChildDoesNotHoldTheLauncher) {
  const std::string tag = unique_tag();
  const auto result =
      run(run_shell(1, "sh -c 'sleep 60; : " + tag + "' & echo done"), 20s);
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(result.out, "done\n");
  EXPECT_EQ(processes_with(tag), 0);
}

// --- exit codes --------------------------------------------------------------

TEST(LaunchExitCode, IsTheFirstFailingWorkersOwn) {
  const auto result = run(
      run_shell(3, "test $RANK = 1 || exec sleep 60; echo why >&2; exit 3"));
  EXPECT_EQ(result.exit_code, 3) << result;
  const auto at = [&](const char* text) { return result.err.find(text); };
  EXPECT_NE(at("rank 1 failed first: exit code 3 (local rank 1, pid "),
            std::string::npos)
      << result;
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  EXPECT_NE(result.err.find(std::string("host ") + host), std::string::npos);
  EXPECT_NE(at("last lines on stderr:\n    why\n"), std::string::npos);
  EXPECT_NE(at("rank 0: stopped by SIGTERM"), std::string::npos) << result;
  EXPECT_NE(at("rank 2: stopped by SIGTERM"), std::string::npos) << result;
  EXPECT_LT(at("failed first"), at("stopped by"));
}

TEST(LaunchExitCode, OfASignalIs128PlusItsNumber) {
  const auto result =
      run(run_shell(2, "test $RANK = 1 || exec sleep 60; kill -SEGV $$"));
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV) << result;
  EXPECT_NE(result.err.find("rank 1 failed first: killed by SIGSEGV"),
            std::string::npos)
      << result;
}

LOCKSTEP_PROCESS(throws) {
  throw std::runtime_error("the reason");
}

TEST(LaunchExitCode, OfAnUncaughtExceptionIsThatOfAbort) {
  const auto worker = at_entry("throws");
  std::vector<std::string> arguments = {"-n", "2"};
  arguments.insert(arguments.end(), worker.argv.begin(), worker.argv.end());
  const auto result = run(lockstep_run(arguments));
  EXPECT_EQ(result.exit_code, 128 + SIGABRT) << result;
  const auto report = result.err.find("failed first: killed by SIGABRT");
  ASSERT_NE(report, std::string::npos) << result;
  EXPECT_NE(result.err.find("the reason", report), std::string::npos);
}

TEST(LaunchExitCode, ComesWithTheErrorThatTheWorkerRecorded) {
  const auto result = run(run_shell(
      2,
      "test $RANK = 1 || exec sleep 60; echo '{\"message\": {\"message\": "
      "\"ValueError: odd\"}}' > $TORCHELASTIC_ERROR_FILE; exit 1"));
  EXPECT_EQ(result.exit_code, 1) << result;
  EXPECT_NE(result.err.find("its error: ValueError: odd\n"), std::string::npos)
      << result;
}

/// Rank 0 ends first, though rank 1 is the cause.
Result run_slow_cause(const std::string& rank_0, const std::string& rank_1) {
  return run(run_shell(2,
                       "trap '' TERM; if test $RANK = 0; then sleep 0.5; " +
                           rank_0 + "; exit 4; fi; " + rank_1 +
                           "; sleep 1.5; exit 3"));
}

void expect_rank_1(const Result& result) {
  EXPECT_EQ(result.exit_code, 3) << result;
  EXPECT_NE(result.err.find("rank 1 failed first: exit code 3"),
            std::string::npos)
      << result;
  EXPECT_NE(result.err.find("after it:\n    rank 0: exit code 4"),
            std::string::npos)
      << result;
}

TEST(LaunchExitCode, IsThatOfTheEarliestError) {
  expect_rank_1(run_slow_cause(
      ":",
      R"(echo '{"message":"x","lockstep_time":1}' > $TORCHELASTIC_ERROR_FILE)"));
}

TEST(LaunchExitCode, IsNotThatOfAConsequence) {
  expect_rank_1(
      run_slow_cause(R"(echo '{"message":"x","lockstep_consequence":true}' )"
                     "> $TORCHELASTIC_ERROR_FILE",
                     ":"));
}

TEST(LaunchExitCode, OfOutputThatCannotBeWrittenIs1) {
  auto command = run_shell(1, "echo text");
  std::string line;
  for (const std::string& word : command.argv) line += " '" + word + "'";
  const auto result = run({.argv = {"sh", "-c", line + " > /dev/full"}});
  EXPECT_EQ(result.exit_code, 1) << result;
  EXPECT_NE(result.err.find("cannot write standard output: No space left"),
            std::string::npos)
      << result;
}

TEST(LaunchExitCode, OfAProgramThatIsNotThereIs127InOneLine) {
  for (const char* program : {"./no-such-program", "no-such-program"}) {
    const auto result = run(lockstep_run({"-n", "4", program}));
    EXPECT_EQ(result.exit_code, 127) << result;
    EXPECT_EQ(lines_of(result.err).size(), 1u) << result;
    EXPECT_NE(result.err.find(program), std::string::npos) << result;
  }
}

TEST(LaunchExitCode, OfAProgramThatCannotBeExecutedIs126) {
  const TempDir directory;
  std::ofstream(directory / "data") << "not a program\n";
  const auto refused = run(lockstep_run({directory / "data"}));
  EXPECT_EQ(refused.exit_code, 126) << refused;
  ::chmod((directory / "data").c_str(), 0755);
  const auto no_format = run(lockstep_run({directory / "data"}));
  EXPECT_EQ(no_format.exit_code, 126) << no_format;
  EXPECT_NE(no_format.err.find("#! line"), std::string::npos) << no_format;
  EXPECT_EQ(run(lockstep_run({directory.path()})).exit_code, 126);
}

TEST(LaunchExitCode, OfAWrongCommandLineIs2) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{
           {},
           {"-n", "0", "true"},
           {"--nproc-per-node", "many", "true"},
           {"--no-such-option", "true"},
           {"--grace", "-1", "true"},
           {"--nnodes", "2", "--node-rank", "2", "true"},
           {"--standalone", "--nnodes", "2", "true"},
           {"true", ":"}}) {
    const auto result = run(lockstep_run(arguments));
    EXPECT_EQ(result.exit_code, 2) << result;
    EXPECT_EQ(lines_of(result.err).size(), 1u) << result;
  }
}

// --- ports -------------------------------------------------------------------

int listen_on(const std::string& address, uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = ::htons(port);
  ::inet_pton(AF_INET, address.c_str(), &name.sin_addr);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)) != 0 ||
      ::listen(fd, 4) != 0) {
    ::close(fd);
    return -1;
  }
  return fd;
}

/// Rank 0 listens on the job's port, alone or through the descriptor.
LOCKSTEP_PROCESS(listens) {
  const auto port =
      static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  const char* fd = std::getenv("LOCKSTEP_MASTER_FD");
  if (std::string(std::getenv("RANK")) != "0") return fd == nullptr ? 0 : 1;
  if (std::getenv("USE_FD") != nullptr) {
    return ::listen(std::atoi(fd), 4) == 0 ? 0 : 2;
  }
  return listen_on("0.0.0.0", port) >= 0 ? 0 : 3;
}

std::vector<std::string> listening_job(std::vector<std::string> options) {
  const auto worker = at_entry("listens");
  options.insert(options.end(), worker.argv.begin(), worker.argv.end());
  return options;
}

TEST(LaunchPort, RankZeroCanBindItOrTakeTheSocket) {
  const auto job = listening_job({"-n", "2"});
  EXPECT_TRUE(run(lockstep_run(job)).ok());
  EXPECT_TRUE(run(lockstep_run(job, {{"USE_FD", "1"}})).ok());
}

TEST(LaunchPort, FourJobsAtOnceNeverMeet) {
  for (int round = 0; round < 10; ++round) {
    std::vector<Process> jobs;
    for (int i = 0; i < 4; ++i) {
      jobs.emplace_back(lockstep_run(listening_job({"-n", "2"})));
    }
    for (Process& job : jobs) {
      const auto result = job.wait(30s);
      EXPECT_TRUE(result.ok()) << result;
    }
  }
}

TEST(LaunchPort, ABusyOneIsNamedWithTheRemedy) {
  uint16_t port = 0;
  const Fd listener = reserve_port(port);
  ::listen(listener.get(), 1);
  const auto result =
      run(lockstep_run({"--master-port", std::to_string(port), "true"}), 2s);
  EXPECT_EQ(result.exit_code, 1) << result;
  EXPECT_NE(result.err.find("127.0.0.1:" + std::to_string(port) +
                            " is already in use; choose another with "
                            "--master-port"),
            std::string::npos)
      << result;
}

TEST(LaunchPort, AnotherLaunchersIsBusyBeforeRankZeroListens) {
  uint16_t port = 0;
  const Fd held = reserve_port(port);
  const std::string number = std::to_string(port);
  Process first(lockstep_run(
      {"--master-port", number, "sh", "-c", "echo ready; sleep 60"}));
  ASSERT_TRUE(first.wait_for_output("ready"));
  const auto second = run(lockstep_run({"--master-port", number, "true"}));
  EXPECT_EQ(second.exit_code, 1) << second;
  first.signal(SIGINT);
  EXPECT_EQ(first.wait().exit_code, 128 + SIGINT);
}

TEST(LaunchPort, AnExplicitOneCanBeUsedAgainAtOnce) {
  uint16_t port = 0;
  const Fd held = reserve_port(port);
  for (int i = 0; i < 5; ++i) {
    const auto result = run(lockstep_run(
        listening_job({"--master-port", std::to_string(port), "-n", "2"})));
    EXPECT_TRUE(result.ok()) << result;
  }
}

TEST(LaunchPort, ANameThatMeansLoopbackIsRefusedOnSeveralNodes) {
  const auto result = run(lockstep_run({"--nnodes",
                                        "2",
                                        "--node-rank",
                                        "1",
                                        "--master-addr",
                                        "localhost",
                                        "true"}));
  EXPECT_EQ(result.exit_code, 2) << result;
  EXPECT_NE(result.err.find("\"localhost\" is "), std::string::npos) << result;
  EXPECT_NE(result.err.find("which other nodes cannot reach"),
            std::string::npos)
      << result;
}

TEST(LaunchPort, AnAddressOfAnotherHostIsRefused) {
  const auto result = run(lockstep_run({"--nnodes",
                                        "2",
                                        "--node-rank",
                                        "0",
                                        "--master-addr",
                                        "192.0.2.1",
                                        "true"}));
  EXPECT_EQ(result.exit_code, 1) << result;
  EXPECT_NE(result.err.find("192.0.2.1 does not belong to this host"),
            std::string::npos)
      << result;
}

}  // namespace
}  // namespace lockstep::test
