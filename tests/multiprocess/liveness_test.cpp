#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "comm/liveness.h"
#include "core/clock.h"
#include "core/env.h"
#include "support/multiprocess.h"
#include "support/two_hosts.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using test::Ranks;
using test::TempDir;

std::shared_ptr<Liveness> join() {
  const auto rank = static_cast<int>(*env::get_int("RANK"));
  const auto size = static_cast<int>(*env::get_int("WORLD_SIZE"));
  return Liveness::start(
      c10::make_intrusive<c10d::FileStore>(std::getenv("STORE_FILE"), size),
      rank,
      size,
      30s);
}

/// Waits for news of the ranks and prints them; 0 when there were any.
int print_news(const Liveness& liveness, const std::vector<int>& of) {
  const Deadline deadline(20s);
  while (!deadline.passed()) {
    if (const auto lost = liveness.peer_lost(of, {})) {
      const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
          Clock::now().time_since_epoch());
      std::printf("lost %d at %lld: %s\n",
                  lost->context().peers.at(0),
                  static_cast<long long>(now.count()),
                  lost->what());
      return 0;
    }
    std::this_thread::sleep_for(1ms);
  }
  return 1;
}

LOCKSTEP_PROCESS(watch_the_others) {
  const auto liveness = join();
  std::printf("ready\n");
  std::vector<int> others;
  for (int rank = 0; rank < liveness->world_size(); ++rank) {
    if (rank != liveness->rank()) others.push_back(rank);
  }
  return print_news(*liveness, others);
}

LOCKSTEP_PROCESS(rank_2_exits_without_goodbye) {
  static auto liveness = join();
  if (liveness->rank() == 2) std::exit(0);
  return print_news(*liveness, {2});
}

LOCKSTEP_PROCESS(rank_2_throws) {
  const auto liveness = join();
  if (liveness->rank() == 2) throw std::logic_error("no such layer");
  const int code = print_news(*liveness, {2});
  // An uncaught PeerLost is a consequence.
  if (liveness->rank() == 1) throw *liveness->peer_lost({2}, {});
  std::this_thread::sleep_for(200ms);
  const auto failure = liveness->failure();
  std::printf("culprit %d left %d\n", failure->rank, liveness->has_left(1));
  return code;
}

LOCKSTEP_PROCESS(rank_2_forks_a_sleeper) {
  const auto liveness = join();
  if (liveness->rank() != 2) return print_news(*liveness, {2});
  const pid_t child = ::fork();
  if (child == 0) {
    // A plain exit of the child is no goodbye of the parent either.
    const pid_t grandchild = ::fork();
    if (grandchild == 0) std::exit(0);
    std::this_thread::sleep_for(10s);
    ::_exit(0);
  }
  std::this_thread::sleep_for(200ms);
  ::raise(SIGKILL);
  return 1;
}

LOCKSTEP_PROCESS(start_and_print_how_long) {
  if (env::get("USER_ID_OF_RANK_1") && *env::get_int("RANK") == 1) {
    if (::setuid(static_cast<uid_t>(*env::get_int("USER_ID_OF_RANK_1"))) != 0) {
      return 2;
    }
  }
  const auto begin = Clock::now();
  const auto liveness = join();
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(
      Clock::now() - begin);
  std::printf("single host %d, started in %lld us\n",
              liveness->single_host(),
              static_cast<long long>(took.count()));
  // Leave together, so that nobody counts as too early.
  std::ofstream(std::string(std::getenv("STORE_FILE")) + ".done." +
                std::to_string(liveness->rank()));
  const Deadline deadline(60s);
  for (int rank = 0; rank < liveness->world_size(); ++rank) {
    while (!std::filesystem::exists(std::string(std::getenv("STORE_FILE")) +
                                    ".done." + std::to_string(rank))) {
      if (deadline.passed()) return 1;
      std::this_thread::sleep_for(1ms);
    }
  }
  return liveness->failure() ? 1 : 0;
}

class LivenessProcesses : public testing::Test {
 protected:
  Ranks start(int n, const std::string& entry) {
    return Ranks(n, entry, {{"STORE_FILE", dir_ / "store"}});
  }

  TempDir dir_;
};

void expect_lost(const test::Result& result, int rank, const char* text) {
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(result.out.find("lost " + std::to_string(rank)),
            result.out.find("lost "))
      << result;
  EXPECT_NE(result.out.find(text), std::string::npos) << result;
}

TEST_F(LivenessProcesses, AKilledRankIsNamedByAllWithinTwoSeconds) {
  auto ranks = start(3, "watch_the_others");
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ranks[i].wait_for_output("ready"));
  const auto killed = std::chrono::duration_cast<std::chrono::milliseconds>(
      Clock::now().time_since_epoch());
  const auto name = "rank 1 (pid " + std::to_string(ranks[1].pid());
  ranks[1].signal(SIGKILL);
  const auto results = ranks.wait();
  for (const int survivor : {0, 2}) {
    const auto& result = results[survivor];
    expect_lost(result, 1, "died");
    EXPECT_NE(result.out.find(name), std::string::npos) << result;
    const auto at = result.out.find(" at ") + 4;
    EXPECT_LT(std::stoll(result.out.substr(at)) - killed.count(), 2000);
  }
}

TEST_F(LivenessProcesses, TwoKilledAtOnceHaveOneCulprit) {
  auto ranks = start(4, "watch_the_others");
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(ranks[i].wait_for_output("ready"));
  ranks[1].signal(SIGKILL);
  ranks[3].signal(SIGKILL);
  const auto results = ranks.wait();
  const auto culprit = [](const test::Result& result) {
    return result.out.substr(result.out.find("lost "), 6);
  };
  EXPECT_EQ(culprit(results[0]), culprit(results[2]));
}

TEST_F(LivenessProcesses, AStoppedRankIsNotDead) {
  auto ranks = start(3, "watch_the_others");
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ranks[i].wait_for_output("ready"));
  ranks[2].signal(SIGSTOP);
  EXPECT_FALSE(ranks[0].wait_for_output("lost", 300ms));
  ranks[1].signal(SIGKILL);
  ASSERT_TRUE(ranks[0].wait_for_output("lost 1"));
  ranks[2].signal(SIGCONT);
  const auto results = ranks.wait();
  expect_lost(results[0], 1, "died");
  expect_lost(results[2], 1, "died");
}

TEST_F(LivenessProcesses, APlainExitCountsAsLeft) {
  const auto results = start(3, "rank_2_exits_without_goodbye").wait();
  EXPECT_EQ(results[2].exit_code, 0) << results[2];
  for (const int rank : {0, 1}) expect_lost(results[rank], 2, "left");
}

TEST_F(LivenessProcesses, AnUncaughtExceptionIsToldToAll) {
  const auto results = start(3, "rank_2_throws").wait();
  const std::string text = "uncaught std::logic_error: no such layer";
  EXPECT_EQ(results[2].signal, SIGABRT) << results[2];
  EXPECT_NE(results[2].err.find("[rank 2/3] " + text + '\n'), std::string::npos)
      << results[2];
  for (const int rank : {0, 1}) {
    EXPECT_NE(results[rank].out.find("lost 2"), std::string::npos);
    EXPECT_NE(results[rank].out.find("failed: " + text), std::string::npos)
        << results[rank];
  }
  EXPECT_EQ(results[1].signal, SIGABRT);
  EXPECT_NE(results[1].err.find("[rank 1/3] uncaught lockstep::PeerLost: "),
            std::string::npos)
      << results[1];
  EXPECT_NE(results[0].out.find("culprit 2 left 1\n"), std::string::npos)
      << results[0];
}

TEST_F(LivenessProcesses, AForkedChildHidesNoDeath) {
  const auto results = start(3, "rank_2_forks_a_sleeper").wait();
  EXPECT_EQ(results[2].signal, SIGKILL);
  for (const int rank : {0, 1}) expect_lost(results[rank], 2, "died");
}

TEST_F(LivenessProcesses, MoreRanksThanCoresStart) {
  const auto results = start(8, "start_and_print_how_long").wait();
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(result.out.find("single host 1"), 0u) << result;
  }
}

TEST_F(LivenessProcesses, RanksOfDifferentUsersCountAsOfDifferentHosts) {
  if (::geteuid() != 0) GTEST_SKIP() << "may not become another user";
  std::ofstream(dir_ / "store");
  std::filesystem::permissions(dir_.path(), std::filesystem::perms::all);
  std::filesystem::permissions(dir_ / "store", std::filesystem::perms::all);
  Ranks ranks(2,
              "start_and_print_how_long",
              {{"STORE_FILE", dir_ / "store"}, {"USER_ID_OF_RANK_1", "65534"}});
  for (const auto& result : ranks.wait()) {
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(result.out.find("single host 0"), 0u) << result;
  }
}

TEST_F(LivenessProcesses, ADeathIsKnownOnOtherHosts) {
  const test::TwoHosts hosts;
  if (!hosts.made()) GTEST_SKIP() << "may not make network namespaces";
  std::vector<test::Command> commands;
  for (const int host : {0, 0, 1, 1}) {
    commands.push_back(hosts.on(
        host,
        test::at_entry("watch_the_others", {{"STORE_FILE", dir_ / "store"}})));
  }
  Ranks ranks(commands);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(ranks[i].wait_for_output("ready"));
  ranks[3].signal(SIGKILL);
  const auto results = ranks.wait();
  for (const int rank : {0, 1, 2}) expect_lost(results[rank], 3, "died");
}

}  // namespace
}  // namespace lockstep::comm
