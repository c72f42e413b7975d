// Sends and receives between processes, of which one dies, stops or leaves.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cstdio>
#include <random>
#include <thread>

#include "core/clock.h"
#include "core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/point_to_point.h"
#include "lockstep/distributed/process_group.h"
#include "support/multiprocess.h"

namespace lockstep::test {
namespace {

constexpr auto kTimeout = 3000ms;

double processor_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) *
             1e-6;
}

int report(const char* kind, const Error& error, double seconds) {
  std::string peers;
  for (const int peer : error.context().peers) {
    peers += ' ' + std::to_string(peer);
  }
  std::printf("%s%s.\nwaiting took %.3f s of the processor\n",
              kind,
              peers.c_str(),
              seconds);
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", error.what());
  return 0;
}

/// Passes 8 MB around a ring for ever, and says how that ended. The group must
/// be of no use afterwards and go within a bound.
LOCKSTEP_PROCESS(pass_around_for_ever) {
  init_process_group({.backend = env::get("BACKEND").value_or("")});
  const int n = get_world_size();
  const int next = (get_rank() + 1) % n;
  const int last = (get_rank() + n - 1) % n;
  const auto own = torch::full({2 << 20}, get_rank() + 1.F);
  auto to = torch::empty({2 << 20});
  int exit_code = 1;
  double before = 0;
  try {
    for (int i = 0;; ++i) {
      if (i == 5) {
        std::puts("running");
        std::fflush(stdout);
      }
      before = processor_seconds();
      const auto sent = isend(own, {.dst = next, .timeout = kTimeout});
      if (i % 2 == 0) {
        recv(to, {.src = last, .timeout = kTimeout});
      } else {
        irecv(to, {.src = last, .timeout = kTimeout}).wait();
      }
      sent.wait();
      if (to[i].item<int>() != last + 1) return 9;
    }
  } catch (const PeerLost& error) {
    exit_code = report("lost", error, processor_seconds() - before);
  } catch (const TimeoutError& error) {
    exit_code = report("timeout", error, processor_seconds() - before);
  }
  try {
    isend(own, {.dst = next});
    return 2;
  } catch (const BackendError&) {
  }
  const Deadline prompt(kTimeout + 2s);
  destroy_process_group();
  return prompt.passed() ? 3 : exit_code;
}

class LostInTransfer : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Backends,
                         LostInTransfer,
                         testing::Values("shm", "gloo"));

TEST_P(LostInTransfer, AKilledRankIsNamedWithinTwoSeconds) {
  const auto before = shared_memory_files();
  std::mt19937 random(7);
  for (int round = 0; round < 12 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const int victim = round % 3;
    Ranks ranks(3, "pass_around_for_ever", {{"BACKEND", GetParam()}});
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(ranks[rank].wait_for_output("running\n"))
          << ranks[rank].wait(0ms);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ranks[victim].signal(SIGKILL);
    const Deadline deadline(2s);
    const auto line = "lost " + std::to_string(victim) + ".\n";
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(ranks[rank].wait_for_output(line, deadline.remaining()));
      const auto result = ranks[rank].wait(10s);
      EXPECT_EQ(result.exit_code, 0) << result;
    }
  }
  EXPECT_EQ(shared_memory_files(), before);
}

TEST_P(LostInTransfer, AStoppedRankIsNamedAtTheDeadline) {
  for (int round = 0; round < 3 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    Ranks ranks(2, "pass_around_for_ever", {{"BACKEND", GetParam()}});
    for (int rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(ranks[rank].wait_for_output("running\n"));
    }
    std::this_thread::sleep_for(round * 3ms);
    const int victim = round % 2;
    const auto stopped = Clock::now();
    ranks[victim].signal(SIGSTOP);
    const auto line = "timeout " + std::to_string(victim) + ".\n";
    auto& other = ranks[1 - victim];
    EXPECT_TRUE(other.wait_for_output(line, kTimeout + 1s)) << other.wait(0ms);
    EXPECT_GE(Clock::now() - stopped, kTimeout - 500ms);
    const auto result = other.wait(20s);
    EXPECT_EQ(result.exit_code, 0) << result;
    const std::string took = "waiting took ";
    const auto at = result.out.find(took);
    ASSERT_NE(at, std::string::npos) << result;
    EXPECT_LT(std::stod(result.out.substr(at + took.size())), 1.0);
    ranks[victim].signal(SIGKILL);
  }
}

/// Rank 0 leaves right after it has begun to send.
LOCKSTEP_PROCESS(leave_after_isend) {
  init_process_group({.backend = env::get("BACKEND").value_or("")});
  const auto message = torch::arange(3'000'000);
  if (get_rank() == 0) {
    isend(message, {.dst = 1, .tag = 2});
    isend(message.slice(0, 0, 5), {.dst = 1, .tag = 1});
    destroy_process_group();
    return 0;
  }
  std::this_thread::sleep_for(300ms);
  auto small = torch::zeros({5}, torch::kLong);
  auto large = torch::zeros({3'000'000}, torch::kLong);
  recv(small, {.src = 0, .tag = 1});
  recv(large, {.src = 0, .tag = 2});
  destroy_process_group();
  return large.equal(message) && small.equal(message.slice(0, 0, 5)) ? 0 : 9;
}

TEST_P(LostInTransfer, ASendIsDeliveredBeforeItsRankLeaves) {
  for (int round = 0; round < 5; ++round) {
    Ranks ranks(2, "leave_after_isend", {{"BACKEND", GetParam()}});
    for (const auto& result : ranks.wait()) {
      EXPECT_TRUE(result.ok()) << result;
    }
  }
}

/// Rank 0 waits for rank 1, which comes three seconds later.
LOCKSTEP_PROCESS(wait_three_seconds) {
  init_process_group({.backend = env::get("BACKEND").value_or("")});
  auto tensor = torch::zeros({1000});
  barrier();
  const double before = processor_seconds();
  if (get_rank() == 0) {
    auto other = torch::zeros({1000});
    const auto pending = irecv(other, {.src = 1, .tag = 1});
    recv(tensor, {.src = 1});
    pending.wait();
  } else {
    std::this_thread::sleep_for(3s);
    send(tensor, {.dst = 0});
    send(tensor, {.dst = 0, .tag = 1});
  }
  const double took = processor_seconds() - before;
  std::printf("%.3f s of the processor\n", took);
  destroy_process_group();
  return took < 0.1 ? 0 : 9;
}

TEST_P(LostInTransfer, WaitingCostsHardlyAnything) {
  Ranks ranks(2, "wait_three_seconds", {{"BACKEND", GetParam()}});
  for (const auto& result : ranks.wait()) EXPECT_TRUE(result.ok()) << result;
}

/// More ranks than cores: 20 messages each way between all pairs.
LOCKSTEP_PROCESS(exchange_with_all) {
  init_process_group({.backend = env::get("BACKEND").value_or("")});
  const int n = get_world_size();
  for (int i = 0; i < 20; ++i) {
    const auto own =
        torch::full({50'000}, get_rank() * 100.F + static_cast<float>(i));
    std::vector<at::Tensor> to;
    std::vector<P2POp> ops;
    for (int peer = 0; peer < n; ++peer) {
      to.push_back(torch::zeros({50'000}));
      if (peer == get_rank()) continue;
      ops.emplace_back(isend, own, peer);
      ops.emplace_back(irecv, to.back(), peer);
    }
    for (const auto& work : batch_isend_irecv(ops)) work.wait();
    for (int peer = 0; peer < n; ++peer) {
      if (peer == get_rank()) continue;
      if (!to[peer].eq(peer * 100 + i).all().item<bool>()) return 9;
    }
  }
  destroy_process_group();
  return 0;
}

TEST_P(LostInTransfer, ManyRanksExchangeWithAll) {
  Ranks ranks(6, "exchange_with_all", {{"BACKEND", GetParam()}});
  for (const auto& result : ranks.wait()) EXPECT_TRUE(result.ok()) << result;
}

}  // namespace
}  // namespace lockstep::test
