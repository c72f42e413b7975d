// `lockstep run`: signals, grace time, and the death of the launcher.
#include "launch_support.h"

namespace lockstep::test {
namespace {

/// The worker's script says "ready" and holds the tag in its command line.
Process start_job(const std::string& script,
                  const std::string& tag,
                  std::vector<std::string> options = {}) {
  options.insert(options.end(), {"-n", "2", "sh", "-c", script + "; : " + tag});
  return Process(lockstep_run(options));
}

bool both_ready(Process& job) {
  return job.wait_for_output("[rank 0]: ready") &&
         job.wait_for_output("[rank 1]: ready");
}

class LaunchStopSignal : public testing::TestWithParam<int> {};

TEST_P(LaunchStopSignal, StopsTheWholeTree) {
  const int signal = GetParam();
  const std::string tag = unique_tag();
  // A child of the worker's own, which a plain kill of the worker would leave.
  Process job = start_job(
      "sh -c 'sleep 61; : " + tag + "' & echo ready; sleep 60; sleep 60",
      tag,
      {"--grace", "2"});
  ASSERT_TRUE(both_ready(job));
  job.signal(signal);
  const auto result = job.wait(10s);
  EXPECT_EQ(result.exit_code, 128 + signal) << result;
  EXPECT_EQ(processes_with(tag), 0);
  EXPECT_EQ(result.err, "");
}

INSTANTIATE_TEST_SUITE_P(All,
                         LaunchStopSignal,
                         testing::Values(SIGINT, SIGTERM, SIGHUP, SIGQUIT));

TEST(LaunchSignals, AWorkerThatIgnoresThemIsKilledAfterTheGraceTime) {
  const std::string tag = unique_tag();
  Process job = start_job(
      "trap '' INT TERM; echo ready; sleep 60", tag, {"--grace", "1"});
  ASSERT_TRUE(both_ready(job));
  const Deadline elapsed(1s);
  job.signal(SIGINT);
  const auto result = job.wait(10s);
  EXPECT_EQ(result.exit_code, 128 + SIGINT) << result;
  EXPECT_TRUE(elapsed.passed());
  EXPECT_EQ(processes_with(tag), 0);
}

TEST(LaunchSignals, ASecondInterruptKillsAtOnce) {
  const std::string tag = unique_tag();
  Process job = start_job(
      "trap 'echo asked' INT; echo ready; while :; do "
      "sleep 0.05; done",
      tag,
      {"--grace", "300"});
  ASSERT_TRUE(both_ready(job));
  job.signal(SIGINT);
  ASSERT_TRUE(job.wait_for_output("[rank 0]: asked"));
  std::this_thread::sleep_for(100ms);
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(10s).exit_code, 128 + SIGINT);
  EXPECT_EQ(processes_with(tag), 0);
}

TEST(LaunchSignals, AWorkerHasTheGraceTimeToSave) {
  const TempDir directory;
  const std::string save =
      "trap 'sleep 1; echo saved > " + (directory / "$RANK") + "; exit 0' TERM";
  Process job = start_job(save + "; echo ready; while :; do sleep 0.05; done",
                          unique_tag(),
                          {"--grace", "20"});
  ASSERT_TRUE(both_ready(job));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(20s).exit_code, 128 + SIGTERM);
  EXPECT_TRUE(std::filesystem::exists(directory / "0"));
  EXPECT_TRUE(std::filesystem::exists(directory / "1"));
}

TEST(LaunchSignals, TheGraceTimeComesFromTheEnvironmentToo) {
  const std::string tag = unique_tag();
  auto command = run_shell(2, "trap '' TERM; echo ready; sleep 60; : " + tag);
  command.env["LOCKSTEP_GRACE"] = "0.2";
  Process job(command);
  ASSERT_TRUE(both_ready(job));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(10s).exit_code, 128 + SIGTERM);
  EXPECT_EQ(processes_with(tag), 0);
}

TEST(LaunchSignals, AFailureGivesTheOthersTheGraceTime) {
  const TempDir directory;
  const std::string ready = directory / "ready";
  const auto result = run(
      run_shell(2,
                "trap 'sleep 0.5; : > " + (directory / "saved") +
                    "; exit 0' TERM; if test $RANK = 1; then until test -e " +
                    ready + "; do sleep 0.05; done; exit 4; fi; : > " + ready +
                    "; while :; do sleep 0.05; done"));
  EXPECT_EQ(result.exit_code, 4) << result;
  EXPECT_TRUE(std::filesystem::exists(directory / "saved"));
}

TEST(LaunchSignals, UserSignalsArePassedOnAndStopNothing) {
  Process job = start_job(
      "trap 'echo one' USR1; trap 'echo two' USR2; echo ready; while :; do "
      "sleep 0.05; done",
      unique_tag());
  ASSERT_TRUE(both_ready(job));
  job.signal(SIGUSR1);
  EXPECT_TRUE(job.wait_for_output("[rank 0]: one"));
  EXPECT_TRUE(job.wait_for_output("[rank 1]: one"));
  job.signal(SIGUSR2);
  EXPECT_TRUE(job.wait_for_output("[rank 0]: two"));
  EXPECT_TRUE(job.wait_for_output("[rank 1]: two"));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(10s).exit_code, 128 + SIGTERM);
}

TEST(LaunchSignals, AStoppedWorkerCanBeEnded) {
  const std::string tag = unique_tag();
  Process job =
      start_job("echo ready; kill -STOP $$; sleep 60", tag, {"--grace", "60"});
  ASSERT_TRUE(both_ready(job));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(10s).exit_code, 128 + SIGTERM);
}

TEST(LaunchSignals, ABackgroundLauncherOfAScriptCanBeInterrupted) {
  // A shell without job control starts it with SIGINT ignored.
  const TempDir directory;
  const std::string ready = directory / "ready";
  const std::string script = std::string(LOCKSTEP_COMMAND) +
                             " run sh -c ': > " + ready +
                             "; sleep 60' & until test -e " + ready +
                             "; do sleep 0.05; done; kill -INT $!; wait $!";
  const auto result = run({.argv = {"sh", "-c", script}}, 20s);
  EXPECT_EQ(result.exit_code, 128 + SIGINT) << result;
}

TEST(LaunchSignals, NohupIsRespected) {
  const std::string launcher = LOCKSTEP_COMMAND;
  const auto result = run(
      {.argv = {"sh",
                "-c",
                "trap '' HUP; " + launcher +
                    " run sh -c 'sleep 0.5; echo done' & sleep 0.2; kill -HUP "
                    "$!; wait $!"}},
      20s);
  EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(result.out, "done\n");
}

TEST(LaunchDeath, KillOfTheLauncherEndsWorkersAndTheirChildren) {
  for (int round = 0; round < 20; ++round) {
    const std::string tag = unique_tag();
    Process job = start_job("trap '' INT TERM HUP; sh -c 'sleep 61; : " + tag +
                                "' & echo ready; sleep 60",
                            tag);
    ASSERT_TRUE(both_ready(job));
    job.signal(SIGKILL);
    EXPECT_EQ(job.wait(5s).signal, SIGKILL);
    EXPECT_TRUE(all_gone(tag, 2s)) << "round " << round;
  }
}

TEST(LaunchDeath, KillWhileTheWorkersStartLeavesNothing) {
  for (int round = 0; round < 30; ++round) {
    const std::string tag = unique_tag();
    Process job(run_shell(8, "sleep 60; : " + tag));
    std::this_thread::sleep_for(milliseconds(round % 10));
    job.signal(SIGKILL);
    (void)job.wait(5s);
    EXPECT_TRUE(all_gone(tag, 2s)) << "round " << round;
  }
}

TEST(LaunchDeath, AReaderThatLeavesEndsTheJob) {
  const std::string tag = unique_tag();
  const auto result = run(
      {.argv = {"sh",
                "-c",
                std::string(LOCKSTEP_COMMAND) +
                    " run -n 2 sh -c 'while :; do echo line; done; : " + tag +
                    "' | head -n 1"}},
      20s);
  EXPECT_EQ(lines_of(result.out).size(), 1u) << result;
  EXPECT_TRUE(all_gone("; : " + tag + '\0', 2s));
}

TEST(LaunchDeath, AReaderThatLeavesGivesTheWorkersTheGraceTime) {
  const TempDir directory;
  const std::string saved = directory / "saved";
  const std::string script = "trap \"sleep 0.2; : > " + saved +
                             "; exit 0\" TERM; while :; do echo line; done";
  const auto result =
      run({.argv = {"bash",
                    "-c",
                    std::string(LOCKSTEP_COMMAND) + " run sh -c '" + script +
                        "' | head -n 1; exit ${PIPESTATUS[0]}"}},
          20s);
  EXPECT_EQ(result.exit_code, 128 + SIGPIPE) << result;
  EXPECT_TRUE(std::filesystem::exists(saved));
}

TEST(LaunchAsProcessOne, WorksAndReapsOrphans) {
  const std::vector<std::string> as_one = {
      "unshare", "--pid", "--fork", "--mount-proc"};
  auto probe = as_one;
  probe.emplace_back("true");
  if (!run({.argv = probe}).ok()) GTEST_SKIP() << "unshare is not permitted";
  const auto job = [&](const std::string& script) {
    auto command = run_shell(2, script);
    command.argv.insert(command.argv.begin(), as_one.begin(), as_one.end());
    return run(command, 20s);
  };
  const auto done = job("echo $RANK $PPID");
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_NE(done.out.find("[rank 1]: 1 1\n"), std::string::npos) << done;
  EXPECT_EQ(job("test $RANK = 0 || exit 5; sleep 60").exit_code, 5);
  // The subshell's child becomes an orphan of process 1, which must reap it.
  const TempDir directory;
  const std::string file = directory / "$RANK";
  const auto orphans =
      job("(sh -c 'echo $$ > " + file + "; sleep 0.1' &); until test -s " +
          file + "; do sleep 0.05; done; while test -e /proc/$(cat " + file +
          "); do sleep 0.05; done");
  EXPECT_TRUE(orphans.ok()) << orphans;
}

}  // namespace
}  // namespace lockstep::test
