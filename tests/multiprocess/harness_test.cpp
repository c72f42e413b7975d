#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "support/multiprocess.h"

namespace lockstep::test {
namespace {

LOCKSTEP_PROCESS(print_environment) {
  for (const char* name : {"RANK",
                           "WORLD_SIZE",
                           "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "EXTRA"}) {
    std::printf("%s=%s\n", name, std::getenv(name));
  }
  std::fprintf(stderr, "port %s", std::getenv("MASTER_PORT"));
  return 3 + std::atoi(std::getenv("RANK"));
}

LOCKSTEP_PROCESS(sleep_for_ever) {
  std::printf("ready\n");
  while (true) ::pause();
}

LOCKSTEP_PROCESS(start_a_child_and_sleep) {
  const Process child(at_entry("sleep_for_ever"));
  std::printf("child %d.\n", child.pid());
  while (true) ::pause();
}

bool gone(pid_t pid) {
  for (int i = 0; i < 400; ++i) {
    if (::kill(pid, 0) != 0 && errno == ESRCH) return true;
    // An orphan may stay a zombie until init reaps it.
    if (!std::filesystem::exists("/proc/" + std::to_string(pid) + "/exe")) {
      return true;
    }
    ::usleep(5000);
  }
  return false;
}

TEST(Harness, RanksGetTheirVariablesAndReportTheirEnd) {
  Ranks ranks(3, "print_environment", {{"EXTRA", "yes"}});
  const auto results = ranks.wait();
  ASSERT_EQ(results.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& result = results[rank];
    const auto number = std::to_string(rank);
    EXPECT_EQ(result.exit_code, 3 + rank) << result;
    EXPECT_EQ(result.signal, 0);
    EXPECT_EQ(result.out,
              "RANK=" + number + "\nWORLD_SIZE=3\nLOCAL_RANK=" + number +
                  "\nLOCAL_WORLD_SIZE=3\nMASTER_ADDR=127.0.0.1\nEXTRA=yes\n");
    EXPECT_EQ(result.err, results[0].err);
  }
}

TEST(Harness, ASignalIsReported) {
  Process process(at_entry("sleep_for_ever"));
  ASSERT_TRUE(process.wait_for_output("ready\n"));
  process.signal(SIGKILL);
  const auto result = process.wait();
  EXPECT_EQ(result.signal, SIGKILL);
  EXPECT_EQ(result.exit_code, -1);
  EXPECT_FALSE(result.timed_out);
}

TEST(Harness, TheDeadlineEndsAProcess) {
  Process process(at_entry("sleep_for_ever"));
  const auto result = process.wait(50ms);
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.signal, SIGTERM);
}

TEST(Harness, AStoppedProcessIsEndedToo) {
  Process process(at_entry("sleep_for_ever"));
  ASSERT_TRUE(process.wait_for_output("ready\n"));
  process.signal(SIGSTOP);
  const auto result = process.wait(50ms);
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.signal, SIGKILL);
}

TEST(Harness, TheOwnerEndsItsProcess) {
  pid_t pid = 0;
  {
    const Process process(at_entry("sleep_for_ever"));
    pid = process.pid();
  }
  EXPECT_TRUE(gone(pid));
}

TEST(Harness, ChildrenDieWithTheirParent) {
  Process process(at_entry("start_a_child_and_sleep"));
  ASSERT_TRUE(process.wait_for_output(".\n"));
  const auto text = process.out();
  const auto child = std::stoi(text.substr(text.find(' ') + 1));
  process.signal(SIGKILL);
  EXPECT_EQ(process.wait().signal, SIGKILL);
  EXPECT_TRUE(gone(child));
}

TEST(Harness, RunsACommandLineWithItsDirectoryAndOutput) {
  const TempDir dir;
  const auto result = run({.argv = {"sh", "-c", "pwd; echo $A >&2; exit 7"},
                           .env = {{"A", "b"}},
                           .directory = dir.path().string()});
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(std::filesystem::path(result.out.substr(0, result.out.size() - 1)),
            std::filesystem::canonical(dir.path()));
  EXPECT_EQ(result.err, "b\n");
}

TEST(Harness, AMissingProgramOrEntryIsSaid) {
  const auto program = run({.argv = {"/nonexistent/program"}});
  EXPECT_EQ(program.exit_code, 127);
  EXPECT_NE(program.err.find("/nonexistent/program"), std::string::npos);
  const auto entry = run(at_entry("no_such_entry"));
  EXPECT_EQ(entry.exit_code, 127);
  EXPECT_NE(entry.err.find("no_such_entry"), std::string::npos);
}

TEST(TempDir, IsRemovedWithItsContent) {
  std::filesystem::path path;
  {
    const TempDir dir;
    path = dir.path();
    std::filesystem::create_directory(dir / "inner");
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace lockstep::test
