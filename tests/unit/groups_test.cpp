#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Ranks = std::vector<int>;

at::Tensor values(int rank, int64_t numel = 5) {
  return torch::arange(numel, at::kFloat) + 10 * (rank + 1);
}

at::Tensor sum_of(const Ranks& ranks, int64_t numel = 5) {
  auto sum = torch::zeros(numel);
  for (const int rank : ranks) sum += values(rank, numel);
  return sum;
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(actual.equal(expected)) << actual << expected;
}

template <class E, class F>
void expect_error(F&& call, const std::string& part, const Ranks& peers = {}) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with \"" << part << '"';
  } catch (const E& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
        << error.what();
    if (!peers.empty()) {
      EXPECT_EQ(error.context().peers, peers);
    }
  }
}

TEST(ProcessGroupHandle, AnEmptyOneIsTheDefaultGroup) {
  const ProcessGroup group;
  EXPECT_THROW((void)group.rank(), InvalidArgument);
  EXPECT_THROW((void)get_world_size(group), InvalidArgument);
  testing::run_ranks(3, [&](int rank) {
    EXPECT_TRUE(group.is_member());
    EXPECT_EQ(group.rank(), rank);
    EXPECT_EQ(get_rank(group), rank);
    EXPECT_EQ(get_world_size(group), 3);
    EXPECT_EQ(get_process_group_ranks(group), (Ranks{0, 1, 2}));
    EXPECT_EQ(get_group_rank(group, 2), 2);
    EXPECT_EQ(get_global_rank(group, 1), 1);
    EXPECT_EQ(group.name(), "0");
    EXPECT_EQ(group.description(), "default_pg");
    EXPECT_EQ(get_backend(group), "shm");
    EXPECT_EQ(group.c10d(), get_group());
    EXPECT_THROW((void)get_group_rank(group, 3), InvalidArgument);
    EXPECT_THROW((void)get_global_rank(group, -1), InvalidArgument);
  });
}

TEST(NewGroup, WithoutADefaultGroup) {
  expect_error<InvalidArgument>([] { (void)new_group({0}); },
                                "init_process_group");
  expect_error<InvalidArgument>([] { (void)new_subgroups(1); },
                                "init_process_group");
  expect_error<InvalidArgument>([] { (void)split_group({}, {{0}}); },
                                "init_process_group");
}

class Groups : public ::testing::TestWithParam<const char*> {
 protected:
  static void run(int n, const std::function<void(int)>& fn) {
    lockstep::testing::run_ranks(n, fn, {.backend = GetParam()});
  }
};

TEST_P(Groups, MembersAndOthers) {
  run(3, [](int rank) {
    const auto group = new_group({2, 0}, {.group_desc = "outer"});
    EXPECT_EQ(group.name(), "1");
    EXPECT_EQ(group.description(), "outer");
    EXPECT_EQ(group.ranks(), (Ranks{0, 2}));
    EXPECT_EQ(group.is_member(), rank != 1);
    EXPECT_EQ(get_rank(group), rank == 1 ? -1 : rank / 2);
    EXPECT_EQ(get_world_size(group), rank == 1 ? -1 : 2);
    EXPECT_EQ(get_group_rank(group, 2), 1);
    EXPECT_EQ(get_global_rank(group, 1), 2);
    EXPECT_THROW((void)get_group_rank(group, 1), InvalidArgument);
    EXPECT_THROW((void)get_global_rank(group, 2), InvalidArgument);
    auto tensor = values(rank);
    all_reduce(tensor, {.group = group});
    auto later = values(rank);
    all_reduce(later, {.async_op = true, .group = group}).wait();
    barrier({.group = group});
    const auto expected = rank == 1 ? values(1) : sum_of({0, 2});
    expect_equal(tensor, expected);
    expect_equal(later, expected);
    if (rank == 1) {
      EXPECT_THROW((void)group.c10d(), InvalidArgument);
    } else {
      EXPECT_EQ(group.backend(), GetParam());
      EXPECT_EQ(group.c10d()->getGroupName(), "1");
      EXPECT_EQ(group.c10d()->getGroupDesc(), "outer");
      EXPECT_EQ(group.c10d()->getSize(), 2);
    }
    const auto all = new_group();
    EXPECT_EQ(all.name(), "2");
    EXPECT_EQ(all.description(), "undefined");
    EXPECT_EQ(all.rank(), rank);
    EXPECT_EQ(all.size(), 3);
  });
}

TEST_P(Groups, OverlappingOnes) {
  run(4, [](int rank) {
    const std::vector<Ranks> lists = {
        {0, 1, 2}, {1, 2, 3}, {0, 3}, {1, 2}, {0, 1, 2, 3}};
    std::vector<ProcessGroup> groups;
    for (const auto& list : lists) groups.push_back(new_group(list));
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < lists.size(); ++i) {
        if (!groups[i].is_member()) continue;
        for (const int64_t numel : {5, 100'000}) {
          auto tensor = values(rank, numel);
          all_reduce(tensor, {.group = groups[i]});
          expect_equal(tensor, sum_of(lists[i], numel));
        }
      }
      auto tensor = values(rank);
      all_reduce(tensor);
      expect_equal(tensor, sum_of({0, 1, 2, 3}));
    }
  });
}

TEST_P(Groups, AllCollectivesInTheOrderOfTheList) {
  run(4, [](int rank) {
    const Ranks order = {3, 0, 2};
    const auto group = new_group(order, {.sort_ranks = false});
    EXPECT_EQ(group.ranks(), order);
    if (rank == 1) return;
    const int own = group.rank();
    EXPECT_EQ(order[own], rank);

    std::vector<at::Tensor> list(3);
    for (auto& tensor : list) tensor = torch::empty(5);
    all_gather(list, values(rank), {.group = group});
    for (int r = 0; r < 3; ++r) expect_equal(list[r], values(order[r]));

    auto whole = torch::empty(15);
    all_gather_into_tensor(whole, values(rank), {.group = group});
    expect_equal(whole, torch::cat(list));

    auto part = torch::empty(5);
    reduce_scatter(part, list, {.group = group});
    expect_equal(part, 3 * values(order[own]));
    reduce_scatter_tensor(part, whole, {.group = group});
    expect_equal(part, 3 * values(order[own]));

    auto exchanged = torch::empty(15);
    all_to_all_single(exchanged, whole, {.group = group});
    expect_equal(exchanged, values(rank).repeat(3));
    std::vector<at::Tensor> received(3);
    for (auto& tensor : received) tensor = torch::empty(5);
    all_to_all(received, list, {.group = group});
    for (const auto& tensor : received) expect_equal(tensor, values(rank));

    for (int root = 0; root < 3; ++root) {
      const int global = order[root];
      for (const bool by_group : {false, true}) {
        std::optional<int> src;
        std::optional<int> group_src;
        (by_group ? group_src : src) = by_group ? root : global;
        auto tensor = values(rank);
        broadcast(tensor, {.src = src, .group = group, .group_src = group_src});
        expect_equal(tensor, values(global));

        tensor = values(rank);
        reduce(tensor, {.dst = src, .group = group, .group_dst = group_src});
        expect_equal(tensor, own == root ? sum_of(order) : values(rank));

        std::vector<at::Tensor> gathered;
        if (own == root) {
          gathered = {torch::empty(5), torch::empty(5), torch::empty(5)};
        }
        gather(values(rank),
               gathered,
               {.dst = src, .group = group, .group_dst = group_src});
        for (size_t r = 0; r < gathered.size(); ++r) {
          expect_equal(gathered[r], values(order[r]));
        }
        tensor = torch::empty(5);
        scatter(tensor,
                gathered,
                {.src = src, .group = group, .group_src = group_src});
        expect_equal(tensor, values(rank));
      }
    }
  });
}

TEST_P(Groups, WrongRoots) {
  run(3, [](int rank) {
    const auto group = new_group({1, 2});
    if (rank == 0) return;
    auto tensor = values(rank);
    expect_error<InvalidArgument>(
        [&] { broadcast(tensor, {.src = 1, .group = group, .group_src = 0}); },
        "both src and group_src are given");
    expect_error<InvalidArgument>(
        [&] { broadcast(tensor, {.src = 0, .group = group}); },
        "src is 0; the group's global ranks are 1, 2");
    expect_error<InvalidArgument>([&] { broadcast(tensor, {.group = group}); },
                                  "src is 0");
    expect_error<InvalidArgument>(
        [&] { reduce(tensor, {.group = group, .group_dst = 2}); },
        "group_dst is 2; the group's ranks are 0 to 1");
    expect_error<InvalidArgument>(
        [&] { all_reduce(tensor, {.group = group, .timeout = 0ms}); },
        "timeout must be positive");
    all_reduce(tensor, {.group = group});
    expect_equal(tensor, sum_of({1, 2}));
  });
}

TEST_P(Groups, OfOneRank) {
  run(2, [](int rank) {
    const auto zero = new_group({0});
    const auto one = new_group({1});
    const auto& own = rank == 0 ? zero : one;
    EXPECT_EQ(own.size(), 1);
    EXPECT_EQ(own.rank(), 0);
    EXPECT_EQ(own.ranks(), Ranks{rank});
    auto tensor = values(rank);
    all_reduce(tensor, {.group = own, .timeout = 1ms});
    broadcast(tensor, {.src = rank, .group = own});
    auto gathered = torch::empty(5);
    all_gather_into_tensor(gathered, tensor, {.group = own});
    expect_equal(gathered, values(rank));
    barrier({.group = own});
    destroy_process_group(own);
    expect_error<InvalidArgument>([&] { barrier({.group = own}); },
                                  "destroyed");
    barrier();
  });
}

TEST_P(Groups, SeveralInFlight) {
  run(3, [](int rank) {
    const std::vector<Ranks> lists = {{0, 1}, {1, 2}, {0, 2}, {0, 1, 2}};
    std::vector<ProcessGroup> groups;
    for (const auto& list : lists) groups.push_back(new_group(list));
    for (int round = 0; round < 20; ++round) {
      std::vector<at::Tensor> tensors(lists.size());
      std::vector<Work> works;
      // Every rank begins with another group.
      for (size_t k = 0; k < lists.size(); ++k) {
        const size_t i = (k + static_cast<size_t>(rank)) % lists.size();
        tensors[i] = values(rank, 20'000);
        works.push_back(
            all_reduce(tensors[i], {.async_op = true, .group = groups[i]}));
      }
      for (const auto& work : works) work.wait();
      for (size_t i = 0; i < lists.size(); ++i) {
        expect_equal(tensors[i],
                     groups[i].is_member() ? sum_of(lists[i], 20'000)
                                           : values(rank, 20'000));
      }
    }
  });
}

TEST_P(Groups, RanksThatAskForOtherGroupsAllSay) {
  run(3, [](int rank) {
    const auto asks = [&](int who, const std::string& list) {
      return "rank " + std::to_string(who) + (who == 0 ? " asks for" : " for") +
             " groups of ranks [" + list + "]";
    };
    for (const auto& part : {asks(0, "0, 1"), asks(2, "0, 2")}) {
      expect_error<MismatchError>(
          [&] {
            (void)new_group(rank == 2 ? Ranks{0, 2} : Ranks{0, 1});
          },
          part,
          {2});
    }
    // What is wrong on one rank alone.
    const auto wrong = [&] {
      (void)new_group(rank == 1 ? Ranks{0, 5} : Ranks{0, 1});
    };
    if (rank == 1) {
      expect_error<InvalidArgument>(wrong, "rank 5");
    } else {
      expect_error<MismatchError>(wrong, asks(1, "0, 5"), {1});
    }
    // Nothing is lost.
    const auto group = new_group({0, 1});
    barrier({.group = group});
    barrier();
  });
}

TEST_P(Groups, WrongLists) {
  run(2, [](int) {
    expect_error<InvalidArgument>(
        [] {
          (void)new_group({0, 1, 0});
        },
        "rank 0 is there twice");
    expect_error<InvalidArgument>(
        [] {
          (void)new_group({0, 2});
        },
        "rank 2 in [0, 2] is out of range; ranks are "
        "0 to 1");
    expect_error<InvalidArgument>([] { (void)new_group({-1}); }, "rank -1");
    expect_error<InvalidArgument>([] { (void)new_group(Ranks{}); }, "empty");
    expect_error<InvalidArgument>(
        [] {
          (void)new_group({0, 1}, {.backend = "gloop"});
        },
        "\"gloop\"");
    expect_error<InvalidArgument>(
        [] {
          (void)new_group({0, 1}, {.timeout = -1ms});
        },
        "timeout");
    expect_error<InvalidArgument>(
        [] {
          (void)new_subgroups_by_enumeration({{0, 1}, {1}});
        },
        "rank 1 is there twice in [0, 1], [1]");
    expect_error<InvalidArgument>(
        [] { (void)new_subgroups_by_enumeration({}); }, "no list");
    expect_error<InvalidArgument>([] { (void)new_subgroups(3); },
                                  "group_size is 3");
    expect_error<InvalidArgument>([] { (void)new_subgroups(0); },
                                  "group_size is 0");
    expect_error<InvalidArgument>([] { (void)split_group({}, {}); }, "empty");
    expect_error<InvalidArgument>(
        [] {
          (void)split_group({}, {{0}, {0}});
        },
        "twice");
    barrier();
  });
}

TEST_P(Groups, Subgroups) {
  run(4, [](int rank) {
    const auto [current, all] = new_subgroups(2, {.group_desc = "pair"});
    ASSERT_EQ(all.size(), 2U);
    EXPECT_EQ(all[0].ranks(), (Ranks{0, 1}));
    EXPECT_EQ(all[1].ranks(), (Ranks{2, 3}));
    EXPECT_EQ(all[0].is_member(), rank < 2);
    EXPECT_EQ(all[1].is_member(), rank >= 2);
    EXPECT_EQ(current.ranks(), all[rank / 2].ranks());
    EXPECT_EQ(current.rank(), rank % 2);
    EXPECT_EQ(current.description(), "pair");
    auto tensor = values(rank);
    all_reduce(tensor, {.group = current});
    expect_equal(tensor, sum_of(current.ranks()));

    EXPECT_EQ(new_subgroups().current.size(), 4);

    const auto odd = new_subgroups_by_enumeration({{3, 1}, {2}});
    EXPECT_EQ(odd.current.is_member(), rank != 0);
    if (odd.current.is_member()) {
      EXPECT_EQ(odd.current.ranks(), rank == 2 ? Ranks{2} : (Ranks{1, 3}));
    }
    tensor = values(rank);
    all_reduce(tensor, {.group = odd.current});
    expect_equal(tensor, rank % 2 == 1 ? sum_of({1, 3}) : values(rank));
  });
}

TEST_P(Groups, Split) {
  run(4, [](int rank) {
    const auto parent = new_group({3, 1, 2}, {.sort_ranks = false});
    if (rank == 0) {
      EXPECT_THROW((void)split_group(parent, {{0, 1}}), InvalidArgument);
      return;
    }
    // Ranks of the parent: 3 and 2 globally; 1 is in none.
    const auto part = split_group(parent, {{2, 0}});
    EXPECT_EQ(part.is_member(), rank != 1);
    EXPECT_EQ(part.ranks(), (Ranks{3, 2}));
    EXPECT_EQ(part.rank(), rank == 1 ? -1 : 3 - rank);
    auto tensor = values(rank);
    all_reduce(tensor, {.group = part});
    expect_equal(tensor, rank == 1 ? values(1) : sum_of({2, 3}));

    const auto again = split_group(parent, {{0}, {1, 2}}, {.timeout = 20s});
    EXPECT_EQ(again.ranks(), rank == 3 ? Ranks{3} : (Ranks{1, 2}));
    expect_error<MismatchError>(
        [&] {
          (void)split_group(
              parent,
              rank == 1 ? std::vector<Ranks>{{0}} : std::vector<Ranks>{{1}});
        },
        "a split into [0]",
        {1});
    barrier({.group = again});
  });
}

TEST_P(Groups, OnlyTheMembersMakeThem) {
  run(3, [](int rank) {
    const NewGroupOptions local = {.use_local_synchronization = true};
    if (rank == 2) {
      EXPECT_FALSE(new_group({0, 1}, local).is_member());
    } else {
      const auto first = new_group({0, 1}, local);
      const auto second = new_group({1, 0}, local);
      EXPECT_NE(first.name(), second.name());
      for (const auto& group : {first, second}) {
        auto tensor = values(rank);
        all_reduce(tensor, {.group = group});
        expect_equal(tensor, sum_of({0, 1}));
      }
    }
    EXPECT_EQ(new_group({0}).name(), "1");
  });
}

TEST_P(Groups, DestroyedOnesAreOfNoUse) {
  ProcessGroup kept;
  run(2, [&](int rank) {
    const auto group = new_group({0, 1});
    const auto other = new_group({0, 1});
    const auto c10d = group.c10d();
    barrier({.group = group});
    destroy_process_group(group);
    destroy_process_group(group);
    expect_error<InvalidArgument>([&] { barrier({.group = group}); },
                                  "destroyed");
    EXPECT_THROW((void)group.rank(), InvalidArgument);
    std::vector<at::Tensor> tensors = {values(rank)};
    EXPECT_THROW(c10d->allreduce(tensors)->wait(), std::exception);
    barrier({.group = other});
    barrier();
    if (rank == 0) kept = other;
  });
  run(2, [&](int) {
    EXPECT_THROW(barrier({.group = kept}), InvalidArgument);
    destroy_process_group(kept);
    barrier();
  });
}

TEST_P(Groups, ErrorsNameGlobalRanks) {
  run(4, [](int rank) {
    const auto group = new_group({3, 1}, {.group_desc = "odd"});
    if (rank % 2 == 0) return;
    auto tensor = values(rank, rank);
    expect_error<MismatchError>([&] { all_reduce(tensor, {.group = group}); },
                                "rank 1 called all_reduce of Float [1] with "
                                "SUM, rank 3 called all_reduce of Float [3]",
                                {3});
    expect_error<BackendError>(
        [&] { barrier({.group = group}); },
        "rank " + std::to_string(rank) + "/4] barrier on group \"odd\"");
  });
}

TEST_P(Groups, AMemberThatFailsIsNamedToTheOthers) {
  Ranks peers;
  try {
    run(3, [&](int rank) {
      const auto group = new_group({1, 2});
      if (rank == 0) return;
      if (rank == 2) throw std::runtime_error("rank 2 gives up");
      try {
        barrier({.group = group});
      } catch (const PeerLost& error) {
        peers = error.context().peers;
        throw;
      }
    });
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "rank 2 gives up");
  }
  EXPECT_EQ(peers, Ranks{2});
}

// R05: the group's own time-out counts, and ends that group alone.
TEST_P(Groups, ATimeoutOfTheirOwn) {
  lockstep::testing::run_ranks(
      3,
      [](int rank) {
        const auto group = new_group({0, 1}, {.timeout = 1s});
        barrier();
        if (rank == 1) std::this_thread::sleep_for(3s);
        if (rank == 0) {
          const Deadline clock(0ms);
          expect_error<TimeoutError>(
              [&] { barrier({.group = group}); }, "rank 1", {1});
          EXPECT_GE(clock.elapsed(), 1s);
          EXPECT_LT(clock.elapsed(), 2s);
          expect_error<BackendError>([&] { barrier({.group = group}); },
                                     "rank 1");
        }
        auto tensor = values(rank);
        all_reduce(tensor);
        expect_equal(tensor, sum_of({0, 1, 2}));
        barrier({.group = new_group({0, 1})});
      },
      {.backend = GetParam(), .timeout = 60s});
}

TEST_P(Groups, ATimeoutPerCall) {
  for (const bool async : {false, true}) {
    lockstep::testing::run_ranks(
        2,
        [&](int rank) {
          const auto group = new_group({1, 0});
          auto tensor = values(rank);
          all_reduce(tensor, {.group = group, .timeout = 30s});
          if (rank == 1) {
            std::this_thread::sleep_for(2s);
          } else {
            const Deadline clock(0ms);
            expect_error<TimeoutError>(
                [&] {
                  all_reduce(
                      tensor,
                      {.async_op = async, .group = group, .timeout = 300ms})
                      .wait();
                },
                "rank 1",
                {1});
            EXPECT_GE(clock.elapsed(), 300ms);
            EXPECT_LT(clock.elapsed(), 1300ms);
          }
          barrier();
        },
        {.backend = GetParam(), .timeout = 60s});
  }
}

INSTANTIATE_TEST_SUITE_P(Shm, Groups, ::testing::Values("shm"));
#ifdef LOCKSTEP_HAS_GLOO
INSTANTIATE_TEST_SUITE_P(Gloo, Groups, ::testing::Values("gloo"));
#endif

}  // namespace
}  // namespace lockstep
