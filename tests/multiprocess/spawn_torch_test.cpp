// `lockstep::spawn` of functions that compute, from a program that did so
// before.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/launch/spawn.h"
#include "support/multiprocess.h"

namespace lockstep::test {
namespace {

/// A threaded product and a backward pass; every entry of the gradient of
/// sum(a b) by a is the sum of a row of b, that is n.
bool computes(int64_t n) {
  auto a = torch::ones({n, n}, torch::requires_grad());
  auto b = torch::ones({n, n});
  a.matmul(b).sum().backward();
  return torch::equal(a.grad(), torch::full({n, n}, float(n)));
}

LOCKSTEP_PROCESS(spawn_after_threads) {
  at::set_num_threads(2);
  if (!computes(512)) return 1;
  return spawn(
      [](const LaunchContext& context) {
        init_process_group({.backend = "gloo"});
        auto sum = torch::full({3}, float(context.rank + 1));
        all_reduce(sum);
        if (!computes(64) || !torch::equal(sum, torch::full({3}, 3.f))) {
          throw std::runtime_error("wrong result");
        }
        destroy_process_group();
      },
      {.nprocs = 2, .timeout = 30s});
}

TEST(SpawnTorch, WorksAfterThreadsWereUsed) {
  for (int i = 0; i < 3; ++i) {
    const auto result = run(at_entry("spawn_after_threads"));
    EXPECT_TRUE(result.ok()) << result;
    EXPECT_EQ(result.err, "");
  }
}

LOCKSTEP_PROCESS(spawn_peer_fails) {
  try {
    spawn(
        [](const LaunchContext& context) {
          init_process_group({.backend = "gloo"});
          if (context.rank == 1) throw std::runtime_error("rank one's reason");
          auto sum = torch::ones({3});
          all_reduce(sum);
        },
        {.nprocs = 2, .timeout = 30s});
  } catch (const LaunchError& error) {
    return error.context().peers == std::vector<int>{1} &&
                   std::string(error.what()).find("rank one's reason") !=
                       std::string::npos
               ? 0
               : 2;
  }
  return 3;
}

TEST(SpawnTorch, TheFailureOfOneEndsTheOtherInACollective) {
  const auto result = run(at_entry("spawn_peer_fails"));
  EXPECT_TRUE(result.ok()) << result;
}

/// Rank 1 fails and then takes its time to end.
void fail_slowly(int rank) {
  init_process_group({.backend = "gloo"});
  if (rank == 0) {
    auto sum = torch::ones({3});
    all_reduce(sum);
  }
  ::signal(SIGABRT, [](int) { std::this_thread::sleep_for(1s); });
  throw std::runtime_error("rank one's reason");
}

LOCKSTEP_PROCESS(launched_slow_failure) {
  // A process that dumps core does not end by SIGTERM either.
  ::signal(SIGTERM, SIG_IGN);
  fail_slowly(std::atoi(std::getenv("RANK")));
  return 0;
}

TEST(FirstFailure, IsTheCauseThoughItEndsLast) {
  auto command = at_entry("launched_slow_failure");
  command.argv.insert(command.argv.begin(),
                      {LOCKSTEP_COMMAND, "run", "-n", "2"});
  const auto result = run(command);
  EXPECT_EQ(result.exit_code, 128 + SIGABRT) << result;
  const auto report = result.err.find("rank 1 failed first: killed by SIGABRT");
  ASSERT_NE(report, std::string::npos) << result;
  EXPECT_NE(result.err.find("rank one's reason", report), std::string::npos);
}

LOCKSTEP_PROCESS(spawned_slow_failure) {
  try {
    spawn(
        [](const LaunchContext& context) {
          // In a thread, so that it ends by the terminate handler.
          std::thread(fail_slowly, context.rank).join();
        },
        {.nprocs = 2, .timeout = 30s});
  } catch (const LaunchError& error) {
    std::puts(error.what());
  }
  return 0;
}

TEST(FirstFailure, OfSpawnIsTheCauseThoughItEndsLast) {
  const auto result = run(at_entry("spawned_slow_failure"));
  EXPECT_NE(result.out.find("rank 1 of 2 failed: uncaught"), std::string::npos)
      << result;
  EXPECT_NE(result.out.find("rank one's reason"), std::string::npos) << result;
}

}  // namespace
}  // namespace lockstep::test
