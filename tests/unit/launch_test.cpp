// Parts of the launcher that need no process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string_view>

#include "launch/cpus.h"
#include "launch/error_file.h"
#include "launch/output.h"
#include "launch/pipe.h"
#include "launch/process.h"
#include "launch/signals.h"
#include "launch/worker_env.h"
#include "lockstep/core/error.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/serializer.h"
#include "lockstep/launch/spawn.h"
#include "support/multiprocess.h"

namespace lockstep::launcher {
namespace {

void write_file(const std::filesystem::path& file, const std::string& text) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

TEST(CpuQuota, IsTheSmallestOfTheGroupsAroundTheProcess) {
  const test::TempDir root;
  write_file(root / "proc/self/cgroup", "0::/a/b\n");
  EXPECT_EQ(cpu_quota(root.path()), INT_MAX);
  write_file(root / "sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), INT_MAX);
  write_file(root / "sys/fs/cgroup/a/b/cpu.max", "350000 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), 3);
  write_file(root / "sys/fs/cgroup/a/cpu.max", "200000 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), 2);
  write_file(root / "sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), 1);
}

TEST(CpuQuota, ReadsControlGroupsOfVersionOne) {
  const test::TempDir root;
  write_file(root / "proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/job\n");
  const std::string group = "sys/fs/cgroup/cpu/job/";
  write_file(root / (group + "cpu.cfs_period_us"), "100000\n");
  write_file(root / (group + "cpu.cfs_quota_us"), "-1\n");
  EXPECT_EQ(cpu_quota(root.path()), INT_MAX);
  write_file(root / (group + "cpu.cfs_quota_us"), "400000\n");
  EXPECT_EQ(cpu_quota(root.path()), 4);
}

/// Binds this process to so many of its CPUs; false when it has fewer.
bool bind_to_cpus(int count) {
  cpu_set_t all;
  cpu_set_t some;
  CPU_ZERO(&some);
  ::sched_getaffinity(0, sizeof(all), &all);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&some) < count; ++cpu) {
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &some);
  }
  return CPU_COUNT(&some) == count &&
         ::sched_setaffinity(0, sizeof(some), &some) == 0;
}

TEST(WorkerCount, OfCpusIsThatOfTheAffinityMask) {
  cpu_set_t before;
  ::sched_getaffinity(0, sizeof(before), &before);
  if (!bind_to_cpus(2) || cpu_quota() < 2) GTEST_SKIP() << "one CPU";
  EXPECT_EQ(worker_count("cpu"), 2);
  ASSERT_TRUE(bind_to_cpus(1));
  EXPECT_EQ(worker_count("cpu"), 1);
  ::sched_setaffinity(0, sizeof(before), &before);
}

TEST(WorkerCount, TakesNumbersAndWords) {
  EXPECT_EQ(worker_count("3"), 3);
  for (const char* bad : {"", "0", "-1", "2x", "NaN", "1.5", "99999999999"}) {
    EXPECT_THROW(worker_count(bad), InvalidArgument) << bad;
  }
  if (visible_gpus() == 0) {
    EXPECT_EQ(worker_count("auto"), allowed_cpus());
    EXPECT_THROW(worker_count("gpu"), InvalidArgument);
  } else {
    EXPECT_EQ(worker_count("auto"), visible_gpus());
    EXPECT_EQ(worker_count("gpu"), visible_gpus());
  }
}

TEST(WorkerEnvironment, NumbersRanksOverTheNodes) {
  const Job job = {.nnodes = 3,
                   .node_rank = 1,
                   .local_world_size = 4,
                   .master_addr = "10.0.0.1",
                   .master_port = 29500,
                   .run_id = "name"};
  auto variables = worker_environment(job, 2, {{"HOME", "/home"}}, 9);
  const Environment expected = {
      {"HOME", "/home"},
      {"RANK", "6"},
      {"WORLD_SIZE", "12"},
      {"LOCAL_RANK", "2"},
      {"LOCAL_WORLD_SIZE", "4"},
      {"GROUP_RANK", "1"},
      {"GROUP_WORLD_SIZE", "3"},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", "6"},
      {"ROLE_WORLD_SIZE", "12"},
      {"MASTER_ADDR", "10.0.0.1"},
      {"MASTER_PORT", "29500"},
      {"TORCHELASTIC_RUN_ID", "name"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"OMP_NUM_THREADS", "2"}};
  EXPECT_EQ(variables, expected);
}

TEST(WorkerEnvironment, KeepsTheUsersThreadsAndDropsAnOuterLauncher) {
  const Job job = {.local_world_size = 2};
  auto variables = worker_environment(job,
                                      0,
                                      {{"OMP_NUM_THREADS", "5"},
                                       {"RANK", "9"},
                                       {"TORCHELASTIC_ERROR_FILE", "/x"},
                                       {"LOCKSTEP_MASTER_FD", "7"}},
                                      2);
  EXPECT_EQ(variables["OMP_NUM_THREADS"], "5");
  EXPECT_EQ(variables["RANK"], "0");
  EXPECT_EQ(variables.count("TORCHELASTIC_ERROR_FILE"), 0u);
  EXPECT_EQ(variables.count("LOCKSTEP_MASTER_FD"), 0u);
  EXPECT_EQ(worker_environment(job, 0, {}, 1)["OMP_NUM_THREADS"], "1");
}

TEST(SignalName, IsTheSystems) {
  EXPECT_EQ(signal_name(11), "SIGSEGV");
  EXPECT_EQ(signal_name(9), "SIGKILL");
  EXPECT_EQ(signal_name(0), "signal 0");
}

// --- output ------------------------------------------------------------------

std::string read_available(int fd) {
  std::string text;
  std::array<char, 65536> buffer;
  for (pollfd ready = {fd, POLLIN, 0}; ::poll(&ready, 1, 0) > 0;) {
    const ssize_t size = ::read(fd, buffer.data(), buffer.size());
    if (size <= 0) break;
    text.append(buffer.data(), static_cast<size_t>(size));
  }
  return text;
}

TEST(Output, LinesAreHeldUntilTheyEnd) {
  const Pipe pipe = make_pipe();
  Sink sink(pipe.write_end.get());
  LineSplitter first(sink, "[0] ");
  LineSplitter second(sink, "[1] ");
  first.add("one ");
  second.add("other\nhalf");
  first.add("line\n\nlast");
  first.finish();
  second.finish();
  second.finish();
  sink.flush();
  EXPECT_EQ(read_available(pipe.read_end.get()),
            "[1] other\n[0] one line\n[0] \n[0] last\n[1] half\n");
}

TEST(Output, AFileGetsABarAsItWasWritten) {
  const Pipe pipe = make_pipe();
  Sink sink(pipe.write_end.get());
  LineSplitter lines(sink, "[0] ");
  lines.add("\r10 %\r20 %");
  sink.flush();
  EXPECT_EQ(read_available(pipe.read_end.get()), "");
  lines.add("\n");
  sink.flush();
  EXPECT_EQ(read_available(pipe.read_end.get()), "[0] \r10 %\r20 %\n");
  EXPECT_EQ(lines.tail().back(), "20 %");
}

TEST(Output, ATerminalKeepsTheBarBelowTheLines) {
  int master = -1;
  int terminal = -1;
  ASSERT_EQ(::openpty(&master, &terminal, nullptr, nullptr, nullptr), 0);
  const Fd master_fd(master);
  const Fd terminal_fd(terminal);
  Sink sink(terminal);
  ASSERT_TRUE(sink.is_terminal());
  LineSplitter bar(sink, "[0] ");
  LineSplitter other(sink, "[1] ");
  const std::string clear = "\r\x1b[K";
  bar.add("\r10 %");
  sink.flush();
  EXPECT_EQ(read_available(master), clear + "[0] 10 %");
  other.add("text\n");
  sink.flush();
  EXPECT_EQ(read_available(master),
            clear + "[1] text\r\n" + clear + "[0] 10 %");
  bar.add("\r20 %\n");
  sink.flush();
  EXPECT_EQ(read_available(master), clear + "[0] 20 %\r\n");
}

TEST(Output, ABarMayEndWithItsReturn) {
  int master = -1;
  int terminal = -1;
  ASSERT_EQ(::openpty(&master, &terminal, nullptr, nullptr, nullptr), 0);
  const Fd master_fd(master);
  const Fd terminal_fd(terminal);
  Sink sink(terminal);
  LineSplitter bar(sink, "[0] ");
  for (const std::string text : {"10 %", "20 %"}) {
    bar.add(text + "\r");
    sink.flush();
    EXPECT_EQ(read_available(master), "\r\x1b[K[0] " + text);
  }
}

TEST(Output, TheTailHoldsTheLastLines) {
  const Pipe pipe = make_pipe();
  Sink sink(pipe.write_end.get());
  LineSplitter lines(sink, "");
  for (int i = 0; i < 25; ++i) lines.add(std::to_string(i) + "\n");
  ASSERT_EQ(lines.tail().size(), 10u);
  EXPECT_EQ(lines.tail().front(), "15");
  EXPECT_EQ(lines.tail().back(), "24");
}

TEST(Output, ASlowReaderNeverBlocksAndLosesNothing) {
  const Pipe pipe = make_pipe();
  Sink sink(pipe.write_end.get());
  LineSplitter lines(sink, "");
  std::string all;
  const std::string line = std::string(99, 'x') + '\n';
  while (!sink.full()) {
    lines.add(line);
    all += line;
  }
  std::string arrived;
  while (sink.pending()) {
    sink.flush();
    arrived += read_available(pipe.read_end.get());
  }
  EXPECT_EQ(arrived, all);
}

TEST(Output, AReaderThatLeftIsRemembered) {
  Pipe pipe = make_pipe();
  pipe.read_end.reset();
  Sink sink(pipe.write_end.get());
  EXPECT_EQ(sink.error(), 0);
  for (int i = 0; i < 2; ++i) {
    sink.line("", "text");
    sink.flush();
    EXPECT_FALSE(sink.pending());
    EXPECT_EQ(sink.error(), EPIPE);
  }
}

TEST(ErrorFile, GivesTheInnermostMessage) {
  const ErrorFile file;
  EXPECT_EQ(file.read().message, "");
  std::ofstream(file.path())
      << R"({"message": {"message": "ValueError: \"x\"\nline \u00e9", )"
         R"("extraInfo": {"py_callstack": "..."}}})";
  EXPECT_EQ(file.read().message, "ValueError: \"x\"\nline ?");
  EXPECT_FALSE(file.read().consequence);
  EXPECT_FALSE(file.read().time);
}

TEST(ErrorFile, GivesARecordedErrorBack) {
  const ErrorFile file;
  ::setenv("TORCHELASTIC_ERROR_FILE", file.path().c_str(), 1);
  for (const bool consequence : {true, false}) {
    const auto before = Clock::now();
    record_error("quote \" backslash \\\ntab \t end", consequence);
    const auto error = file.read();
    EXPECT_EQ(error.message, "quote \" backslash \\\ntab ? end");
    EXPECT_EQ(error.consequence, consequence);
    ASSERT_TRUE(error.time);
    EXPECT_GE(*error.time, before);
    EXPECT_LE(*error.time, Clock::now());
  }
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  record_error("nobody asked", false);
}

TEST(ErrorFile, TakesOtherContentForNothing) {
  EXPECT_EQ(error_message(R"({"message":"plain"})"), "plain");
  for (const char* text :
       {"", "{}", "\"message\":", R"({"message": {"text": 1}})", "garbage"}) {
    EXPECT_EQ(error_message(text), "") << text;
  }
  EXPECT_EQ(error_message(R"({"message": "cut \)"), "cut ");
}

// --- arguments of spawn ------------------------------------------------------

TEST(Serializer, GivesValuesBack) {
  ByteWriter writer;
  Serializer<int>::write(writer, -5);
  Serializer<std::string>::write(writer, std::string("a\0b", 3));
  Serializer<std::vector<std::vector<float>>>::write(writer, {{1, 2}, {}});
  Serializer<std::vector<bool>>::write(writer, {true, false, true});
  ByteReader reader(writer.bytes());
  EXPECT_EQ(Serializer<int>::read(reader), -5);
  EXPECT_EQ(Serializer<std::string>::read(reader), std::string("a\0b", 3));
  EXPECT_EQ(Serializer<std::vector<std::vector<float>>>::read(reader),
            (std::vector<std::vector<float>>{{1, 2}, {}}));
  EXPECT_EQ(Serializer<std::vector<bool>>::read(reader),
            (std::vector<bool>{true, false, true}));
  EXPECT_THROW(Serializer<char>::read(reader), InvalidArgument);
}

TEST(Serializer, RefusesBytesThatAreCutOff) {
  ByteWriter writer;
  Serializer<std::string>::write(writer, "text");
  ByteReader reader(std::string_view(writer.bytes()).substr(0, 10));
  EXPECT_THROW(Serializer<std::string>::read(reader), InvalidArgument);
}

static_assert(detail::is_view<std::span<int>>);
static_assert(detail::is_view<std::string_view>);
static_assert(detail::is_view<std::reference_wrapper<int>>);
static_assert(!detail::is_view<std::array<int, 3>>);
static_assert(!detail::is_view<int>);
static_assert(
    std::is_same_v<detail::Sent<const std::string_view&>, std::string>);

TEST(Launch, RefusesJobsThatAreNotPossible) {
  EXPECT_THROW(launch({}), InvalidArgument);
  EXPECT_THROW(launch({.programs = {{}}}), InvalidArgument);
  EXPECT_THROW(launch({.programs = {{{"true"}, 0}}}), InvalidArgument);
  EXPECT_THROW(launch({.programs = {{{"true"}, 1}}, .node_rank = 1}),
               InvalidArgument);
  EXPECT_THROW(launch({.programs = {{{"true"}, 1}}, .nnodes = 2}),
               InvalidArgument);
  EXPECT_THROW(launch({.programs = {{{"true"}, 1}}, .master_port = 70000}),
               InvalidArgument);
  EXPECT_THROW(launch({.programs = {{{"true"}, 1}},
                       .nnodes = 2,
                       .master_addr = "localhost",
                       .master_port = 29500}),
               InvalidArgument);
  EXPECT_THROW(launch({.programs = {{{"true"}, 1}},
                       .grace = std::chrono::milliseconds(-1)}),
               InvalidArgument);
}

TEST(Launch, ReturnsTheExitCodes) {
  const auto result = launch({.programs = {{{"true"}, 2}, {{"true"}, 1}}});
  EXPECT_EQ(result.exit_codes, (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(result.signal, 0);
}

TEST(Launch, NeedsTheEndsOfItsProcesses) {
  ::signal(SIGCHLD, SIG_IGN);
  EXPECT_THROW(launch({.programs = {{{"true"}, 1}}}), InvalidArgument);
  ::signal(SIGCHLD, SIG_DFL);
}

void other_handler(int) {
}

TEST(SignalRelay, LeavesToTheProgramWhatItHandles) {
  const auto handler_of = [](int signal) {
    struct sigaction action = {};
    ::sigaction(signal, nullptr, &action);
    return action.sa_handler;
  };
  ::signal(SIGINT, SIG_IGN);
  ::signal(SIGUSR1, other_handler);
  {
    const SignalRelay relay(false);
    EXPECT_EQ(handler_of(SIGINT), SIG_IGN);
    EXPECT_EQ(handler_of(SIGUSR1), other_handler);
    ::signal(SIGTERM, other_handler);
  }
  EXPECT_EQ(handler_of(SIGTERM), other_handler);
  {
    const SignalRelay relay(true);
    EXPECT_NE(handler_of(SIGINT), SIG_IGN);
  }
  EXPECT_EQ(handler_of(SIGINT), SIG_IGN);
  for (const int signal : {SIGINT, SIGUSR1, SIGTERM}) {
    ::signal(signal, SIG_DFL);
  }
}

TEST(Launch, ThrowsTheFirstFailure) {
  try {
    launch({.programs = {{{"sleep", "60"}, 1}, {{"sh", "-c", "exit 7"}, 1}}});
    FAIL() << "no error";
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.exit_code(), 7);
    EXPECT_EQ(error.context().peers, std::vector<int>{1});
  }
  try {
    launch({.programs = {{{"no-such-program"}, 1}}});
    FAIL() << "no error";
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.exit_code(), 127);
  }
}

}  // namespace
}  // namespace lockstep::launcher
