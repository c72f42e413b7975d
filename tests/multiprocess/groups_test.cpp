#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/new_group.h"
#include "support/multiprocess.h"
#include "support/two_hosts.h"

namespace lockstep::test {
namespace {

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

/// Reduces in the group until its end; the ranks that the error is about.
std::string end_of(const ProcessGroup& group) {
  try {
    while (true) {
      auto tensor = torch::ones(1000);
      all_reduce(tensor, {.group = group});
    }
  } catch (const PeerLost& error) {
    std::string text = "lost";
    for (const int peer : error.context().peers) {
      text += ' ' + std::to_string(peer);
    }
    if (std::string(error.what()).find("rank 2 ") == std::string::npos) {
      text += " in " + std::string(error.what());
    }
    return text;
  }
}

/// Ranks 0 and 1 reduce in every group that they share with rank 2 until it
/// dies, then in the one without it.
LOCKSTEP_PROCESS(groups_of_a_victim) {
  init_process_group();
  const auto pair = new_group({0, 1});
  const auto others = {new_group({0, 2}), new_group({2, 1})};
  say("ready");
  for (const auto& group : others) {
    if (group.is_member()) say(end_of(group));
  }
  for (int i = 0; i < 200; ++i) {
    auto tensor = torch::ones(1000);
    all_reduce(tensor, {.group = pair});
    if (tensor[0].item<float>() != 2) return 9;
  }
  say("pair works");
  say(end_of({}));
  // Nobody waits for the dead one.
  try {
    (void)new_group({0, 1, 2});
    return 8;
  } catch (const PeerLost&) {
  }
  const auto later = new_group({0, 1}, {.use_local_synchronization = true});
  barrier({.group = later});
  destroy_process_group(pair);
  destroy_process_group();
  say("passed");
  return 0;
}

/// Rank 0 does not catch the error about rank 2, for whom rank 1 does not wait.
LOCKSTEP_PROCESS(groups_with_an_uncaught_error) {
  init_process_group();
  const auto pair = new_group({0, 1});
  const auto other = new_group({0, 2});
  say("ready");
  if (get_rank() == 1) {
    say(end_of(pair));
  } else if (get_rank() == 2) {
    ::pause();
  } else {
    barrier({.group = other});
  }
  return 0;
}

class Groups : public ::testing::TestWithParam<const char*> {};

TEST_P(Groups, AKilledMemberIsNamedAndTheRestGoesOn) {
  Ranks ranks(3, "groups_of_a_victim", {{"LOCKSTEP_BACKEND", GetParam()}});
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(ranks[rank].wait_for_output("ready\n")) << ranks[rank].wait(1s);
  }
  std::this_thread::sleep_for(100ms);
  ranks[2].signal(SIGKILL);
  const auto results = ranks.wait(30s);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(results[rank].ok()) << results[rank];
    EXPECT_EQ(results[rank].out, "ready\nlost 2\npair works\nlost 2\npassed\n")
        << results[rank];
  }
}

TEST_P(Groups, ARankThatDiesOfADeathElsewhereSaysSo) {
  Ranks ranks(
      3, "groups_with_an_uncaught_error", {{"LOCKSTEP_BACKEND", GetParam()}});
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(ranks[rank].wait_for_output("ready\n")) << ranks[rank].wait(1s);
  }
  ranks[2].signal(SIGKILL);
  const auto results = ranks.wait(30s);
  EXPECT_EQ(results[0].signal, SIGABRT) << results[0];
  EXPECT_TRUE(results[1].ok()) << results[1];
  EXPECT_EQ(results[1].out, "ready\nlost 0\n") << results[1];
}

INSTANTIATE_TEST_SUITE_P(Shm, Groups, ::testing::Values("shm"));
#ifdef LOCKSTEP_HAS_GLOO
INSTANTIATE_TEST_SUITE_P(Gloo, Groups, ::testing::Values("gloo"));

/// Two ranks on each host: those of a host share memory, others use Gloo.
LOCKSTEP_PROCESS(groups_on_two_hosts) {
  init_process_group();
  const int rank = get_rank();
  if (get_backend() != "hybrid") return 2;
  const auto neighbours = new_subgroups(2).current;
  const auto far = new_subgroups_by_enumeration({{0, 3}, {1, 2}}).current;
  if (neighbours.backend() != "shm" || far.backend() != "gloo") return 3;
  auto tensor = torch::full(100'000, rank);
  all_reduce(tensor, {.group = neighbours});
  if (tensor[0].item<int64_t>() != (rank < 2 ? 1 : 5)) return 4;
  tensor.fill_(rank);
  all_reduce(tensor, {.group = far});
  if (tensor[0].item<int64_t>() != 3) return 5;
  destroy_process_group();
  say("passed");
  return 0;
}

TEST(GroupsOnTwoHosts, EachUsesWhatItsMembersShare) {
  const TwoHosts hosts;
  if (!hosts.made()) GTEST_SKIP() << "no right to make network namespaces";
  std::vector<Command> commands;
  for (int rank = 0; rank < 4; ++rank) {
    commands.push_back(
        hosts.on(rank / 2,
                 at_entry("groups_on_two_hosts",
                          {{"MASTER_ADDR", TwoHosts::address(0)},
                           {"LOCAL_RANK", std::to_string(rank % 2)},
                           {"LOCAL_WORLD_SIZE", "2"}})));
  }
  Ranks ranks(std::move(commands));
  for (const auto& result : ranks.wait(60s)) {
    EXPECT_TRUE(result.ok()) << result;
    EXPECT_EQ(result.out, "passed\n") << result;
  }
}
#endif

}  // namespace
}  // namespace lockstep::test
