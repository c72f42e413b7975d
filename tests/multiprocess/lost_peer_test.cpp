#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/backend_registry.h"
#include "core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "support/multiprocess.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 2000ms;

int report(const char* kind, const Error& error) {
  std::string peers;
  for (const int peer : error.context().peers) {
    peers += ' ' + std::to_string(peer);
  }
  std::printf("%s%s.\n", kind, peers.c_str());
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", error.what());
  return 0;
}

bool is_rank_of(const char* variable) {
  const char* rank = std::getenv(variable);
  return rank != nullptr && std::string(std::getenv("RANK")) == rank;
}

/// Reduces 1 MB again and again, and says how that ended. The group must be of
/// no use afterwards and go within a bound. Rank STOPS stops between two calls;
/// rank HASTY has a quarter of the others' timeout.
LOCKSTEP_PROCESS(reduce_for_ever) {
  init_process_group({.backend = "gloo"});
  get_group()->getBackend(at::kCPU)->setTimeout(
      is_rank_of("HASTY") ? kTimeout / 4 : kTimeout);
  int exit_code = 1;
  try {
    auto tensor = torch::ones(1 << 18);
    for (int i = 0;; ++i) {
      all_reduce(tensor, {.op = ReduceOp::AVG});
      if (i != 3) continue;
      std::puts("running");
      std::fflush(stdout);
      if (is_rank_of("STOPS")) ::raise(SIGSTOP);
    }
  } catch (const PeerLost& error) {
    exit_code = report("lost", error);
  } catch (const TimeoutError& error) {
    exit_code = report("timeout", error);
  }
  try {
    barrier();
    exit_code = 2;
  } catch (const Error&) {
  }
  // Rank 0 keeps the store for the others, at most for the timeout.
  const Deadline prompt(kTimeout + 2s);
  destroy_process_group();
  return prompt.passed() ? 3 : exit_code;
}

/// Rank LEAVER leaves before a call that the others make, PAUSE milliseconds
/// later. Its size is that of what ranks tell each other when they leave.
LOCKSTEP_PROCESS(call_without_one_rank) {
  init_process_group({.backend = "gloo"});
  barrier();
  if (is_rank_of("LEAVER")) {
    destroy_process_group();
    return 0;
  }
  std::this_thread::sleep_for(
      std::chrono::milliseconds(std::atoi(std::getenv("PAUSE"))));
  try {
    auto tensor = torch::ones(14);
    all_reduce(tensor);
    return 1;
  } catch (const PeerLost& error) {
    return report("lost", error);
  }
}

/// Rank VICTIM dies while the others connect.
LOCKSTEP_PROCESS(die_while_connecting) {
  comm::register_backend(
      "dies",
      [](const comm::BackendContext&) -> c10::intrusive_ptr<c10d::Backend> {
        ::raise(SIGKILL);
        return nullptr;
      });
  try {
    if (is_rank_of("VICTIM")) {
      init_process_group({.backend = "dies"});
    } else {
      init_process_group();
      barrier();
    }
    return 1;
  } catch (const PeerLost& error) {
    return report("lost", error);
  }
}

/// Rank `victim` is lost; the others must write `line` within `limit` and end
/// well.
void expect_named(test::Ranks& ranks,
                  int victim,
                  const std::string& line,
                  test::milliseconds limit) {
  const Deadline deadline(limit);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim) continue;
    EXPECT_TRUE(ranks[rank].wait_for_output(line, deadline.remaining()))
        << "rank " << rank;
    const auto result = ranks[rank].wait(10s);
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(result.out, "running\n" + line) << result;
  }
  ranks[victim].signal(SIGKILL);
  EXPECT_EQ(ranks[victim].wait(10s).signal, SIGKILL);
}

void expect_running(test::Ranks& ranks) {
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(ranks[rank].wait_for_output("running\n"))
        << ranks[rank].wait(0ms);
  }
}

TEST(LostGlooPeer, AKillIsNamedWithinTwoSeconds50Times) {
  const auto before = test::shared_memory_files();
  for (int round = 0; round < 50 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const int victim = round % 3;
    test::Ranks ranks(3, "reduce_for_ever");
    expect_running(ranks);
    ranks[victim].signal(SIGKILL);
    expect_named(ranks, victim, "lost " + std::to_string(victim) + ".\n", 2s);
  }
  EXPECT_EQ(test::shared_memory_files(), before);
}

TEST(LostGlooPeer, OneStoppedBetweenCallsIsNamedAtTheDeadline) {
  test::Ranks ranks(3, "reduce_for_ever", {{"STOPS", "1"}});
  expect_running(ranks);
  expect_named(ranks, 1, "timeout 1.\n", kTimeout + 2s);
}

TEST(LostGlooPeer, OneStoppedAtAnyMomentIsNamedAtTheDeadline) {
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const int victim = round % 3;
    test::Ranks ranks(3, "reduce_for_ever");
    expect_running(ranks);
    std::this_thread::sleep_for(round * 7ms);
    ranks[victim].signal(SIGSTOP);
    expect_named(ranks,
                 victim,
                 "timeout " + std::to_string(victim) + ".\n",
                 kTimeout + 2s);
  }
}

TEST(LostGlooPeer, TheOneThatAnotherGaveUpOnIsNamed) {
  test::Ranks ranks(3, "reduce_for_ever", {{"STOPS", "1"}, {"HASTY", "0"}});
  expect_running(ranks);
  expect_named(ranks, 1, "timeout 1.\n", kTimeout + 2s);
}

TEST(LostGlooPeer, ARankThatLeftIsNamedWheneverTheOthersCall) {
  for (const char* check : {"1", "0"}) {
    for (const char* pause : {"0", "300", "1500"}) {
      SCOPED_TRACE(std::string(check) + ' ' + pause);
      test::Ranks ranks(
          3,
          "call_without_one_rank",
          {{"LEAVER", "1"}, {"PAUSE", pause}, {"LOCKSTEP_CHECK", check}});
      const auto results = ranks.wait();
      EXPECT_TRUE(results[1].ok()) << results[1];
      for (const int rank : {0, 2}) {
        EXPECT_EQ(results[rank].out, "lost 1.\n") << results[rank];
      }
    }
  }
}

class LostPeer : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Backends, LostPeer, testing::Values("gloo", "shm"));

TEST_P(LostPeer, AKillWhileConnectingIsNamed) {
  for (const int victim : {0, 1}) {
    test::Ranks ranks(
        3,
        "die_while_connecting",
        {{"LOCKSTEP_BACKEND", GetParam()}, {"VICTIM", std::to_string(victim)}});
    const auto results = ranks.wait();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) {
        EXPECT_EQ(results[rank].signal, SIGKILL);
      } else {
        EXPECT_EQ(results[rank].exit_code, 0) << results[rank];
        EXPECT_EQ(results[rank].out, "lost " + std::to_string(victim) + ".\n")
            << results[rank];
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
