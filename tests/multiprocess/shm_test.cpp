#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdio>
#include <random>
#include <thread>

#include "core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "support/multiprocess.h"

namespace lockstep::test {
namespace {

int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double processor_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) *
             1e-6;
}

void report(const char* type, const Error& error) {
  std::printf("%s at %lld peers", type, static_cast<long long>(now_ms()));
  for (const int peer : error.context().peers) std::printf(" %d", peer);
  std::printf(".\n%s\n", error.what());
}

/// Reduces for ever; prints how it ended.
LOCKSTEP_PROCESS(all_reduce_for_ever) {
  const milliseconds timeout(env::get_int("TEST_TIMEOUT_MS").value_or(60'000));
  init_process_group({.backend = "shm"});
  get_group()->getBackend(c10::DeviceType::CPU)->setTimeout(timeout);
  auto tensor = torch::ones({256 * 1024});
  double last = 0;
  try {
    for (int i = 0;; ++i) {
      if (i == 20) {
        std::printf("ready\n");
        std::fflush(stdout);
      }
      tensor.fill_(1);
      last = processor_seconds();
      all_reduce(tensor);
      if (tensor[777].item<float>() != 3) return 9;
    }
  } catch (const PeerLost& error) {
    report("PeerLost", error);
  } catch (const TimeoutError& error) {
    report("TimeoutError", error);
    std::printf("waiting took %.3f s of the processor\n",
                processor_seconds() - last);
  }
  try {
    all_reduce(tensor);
    return 8;
  } catch (const BackendError&) {
  }
  destroy_process_group();
  return 0;
}

int64_t time_of_error(const Result& result) {
  const auto at = result.out.find(" at ");
  return at == std::string::npos ? 0 : std::stoll(result.out.substr(at + 4));
}

TEST(ShmProcesses, AKilledRankIsNamedByAllWithinTwoSeconds) {
  const auto before = shared_memory_files();
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const int victim = round % 3;
    Ranks ranks(3, "all_reduce_for_ever");
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(ranks[rank].wait_for_output("ready\n"))
          << ranks[rank].wait(1s);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    const auto killed = now_ms();
    ranks[victim].signal(SIGKILL);
    const auto results = ranks.wait(20s);
    for (int rank = 0; rank < 3; ++rank) {
      const auto& result = results[static_cast<size_t>(rank)];
      if (rank == victim) {
        EXPECT_EQ(result.signal, SIGKILL);
        continue;
      }
      EXPECT_TRUE(result.ok()) << result;
      EXPECT_NE(result.out.find("PeerLost at "), std::string::npos) << result;
      EXPECT_NE(result.out.find("peers " + std::to_string(victim) + "."),
                std::string::npos)
          << result;
      EXPECT_LT(time_of_error(result) - killed, 2000);
    }
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_EQ(shared_memory_files(), before);
}

TEST(ShmProcesses, AStoppedRankIsNamedAtTheDeadline) {
  Ranks ranks(3, "all_reduce_for_ever", {{"TEST_TIMEOUT_MS", "3000"}});
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(ranks[rank].wait_for_output("ready\n"));
  }
  const auto stopped = now_ms();
  ranks[1].signal(SIGSTOP);
  for (const int rank : {0, 2}) {
    const auto result = ranks[rank].wait(20s);
    EXPECT_TRUE(result.ok()) << result;
    EXPECT_NE(result.out.find("TimeoutError at "), std::string::npos) << result;
    EXPECT_NE(result.out.find("peers 1."), std::string::npos) << result;
    EXPECT_GE(time_of_error(result) - stopped, 2900);
    EXPECT_LT(time_of_error(result) - stopped, 4000);
    const std::string took = "waiting took ";
    const auto at = result.out.find(took);
    ASSERT_NE(at, std::string::npos) << result;
    EXPECT_LT(std::stod(result.out.substr(at + took.size())), 1.0);
  }
  ranks[1].signal(SIGKILL);
}

LOCKSTEP_PROCESS(all_reduce_16_mb) {
  init_process_group({.backend = "shm"});
  auto tensor = torch::arange(4 * 1024 * 1024).remainder(1000);
  const auto want = tensor * 2;
  all_reduce(tensor);
  destroy_process_group();
  return torch::equal(tensor, want) ? 0 : 9;
}

LOCKSTEP_PROCESS(two_ranks_reduce_16_mb) {
  for (const auto& result : Ranks(2, "all_reduce_16_mb").wait()) {
    std::fputs(result.err.c_str(), stderr);
    if (!result.ok()) return 1;
  }
  return 0;
}

TEST(ShmProcesses, DevShmOfOneMegabyteDoesNotBindIt) {
  if (!run({{"unshare", "-Urm", "true"}}).ok()) {
    GTEST_SKIP() << "no new user and mount namespace here";
  }
  std::vector<std::string> argv = {
      "unshare",
      "-Urm",
      "sh",
      "-c",
      "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec \"$@\"",
      "sh"};
  for (const auto& word : at_entry("two_ranks_reduce_16_mb").argv) {
    argv.push_back(word);
  }
  const auto result = run({argv});
  EXPECT_TRUE(result.ok()) << result;
}

}  // namespace
}  // namespace lockstep::test
