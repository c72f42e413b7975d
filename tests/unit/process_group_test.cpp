#include <gtest/gtest.h>

#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/group.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

c10::intrusive_ptr<c10d::Store> new_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

TEST(ProcessGroup, WithoutAGroupTheQueriesDescribeOneRank) {
  EXPECT_FALSE(is_initialized());
  EXPECT_EQ(get_rank(), 0);
  EXPECT_EQ(get_world_size(), 1);
  EXPECT_EQ(get_local_rank(), 0);
  EXPECT_EQ(get_local_world_size(), 1);
  EXPECT_THROW((void)get_backend(), InvalidArgument);
  EXPECT_THROW((void)get_group(), InvalidArgument);
  EXPECT_NO_THROW(destroy_process_group());
  EXPECT_TRUE(device().is_cpu() || device().is_cuda());
}

TEST(ProcessGroup, WorldOfOneOverAStore) {
  init_process_group(new_store(), {.world_size = 1, .rank = 0});
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(get_backend(), "self");
  EXPECT_EQ(get_group()->getSize(), 1);
  EXPECT_THROW(init_process_group(new_store(), {.world_size = 1, .rank = 0}),
               InvalidArgument);
  auto tensor = torch::arange(4);
  all_reduce(tensor, {.op = ReduceOp::AVG});
  EXPECT_TRUE(tensor.equal(torch::arange(4)));
  auto group = get_group();
  destroy_process_group();
  EXPECT_FALSE(is_initialized());
  std::vector<at::Tensor> tensors = {tensor};
  EXPECT_THROW(group->allreduce(tensors), std::exception);
  init_process_group(new_store(), {.world_size = 1, .rank = 0});
  destroy_process_group();
}

TEST(ProcessGroup, WhoeverHoldsADestroyedGroupCanTell) {
  init_process_group(new_store(), {.world_size = 1, .rank = 0});
  const auto group = distributed::default_group();
  EXPECT_FALSE(group->destroyed);
  destroy_process_group();
  EXPECT_TRUE(group->destroyed);
}

TEST(ProcessGroup, ThreadsAreRanksOfTheirOwn) {
  for (const int n : {1, 2, 3, 5}) {
    std::vector<int> seen(n, 0);
    testing::run_ranks(n, [&](int rank) {
      EXPECT_EQ(get_rank(), rank);
      EXPECT_EQ(get_world_size(), n);
      EXPECT_EQ(get_local_rank(), rank);
      EXPECT_EQ(get_local_world_size(), n);
      EXPECT_EQ(get_backend(), n == 1 ? "self" : "shm");
      EXPECT_EQ(get_group()->getRank(), rank);
      barrier();
      seen[rank] = 1;
    });
    EXPECT_EQ(seen, std::vector<int>(n, 1));
    EXPECT_FALSE(is_initialized());
  }
}

TEST(ProcessGroup, TheGroupServesC10d) {
  testing::run_ranks(2, [](int rank) {
    std::vector<at::Tensor> tensors = {torch::full({3}, rank + 1)};
    get_group()->allreduce(tensors)->wait();
    EXPECT_TRUE(tensors[0].equal(torch::full({3}, 3)));
  });
}

TEST(ProcessGroup, RunRanksRethrowsTheFirstError) {
  EXPECT_THROW(testing::run_ranks(0, [](int) {}), InvalidArgument);
  try {
    testing::run_ranks(3, [](int rank) {
      if (rank == 2) throw std::runtime_error("rank 2 gives up");
      barrier();
    });
    FAIL() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "rank 2 gives up");
  }
}

TEST(ProcessGroup, WrongArgumentsWithAStore) {
  EXPECT_THROW(init_process_group(nullptr, {.world_size = 1, .rank = 0}),
               InvalidArgument);
  EXPECT_THROW(init_process_group(new_store(), {.world_size = 2}),
               InvalidArgument);
  EXPECT_THROW(init_process_group(new_store(), {.world_size = 2, .rank = 2}),
               InvalidArgument);
  EXPECT_THROW(init_process_group(new_store(), {.world_size = 2, .rank = -1}),
               InvalidArgument);
  EXPECT_THROW(init_process_group(new_store(), {.world_size = 0, .rank = 0}),
               InvalidArgument);
  try {
    init_process_group(new_store(),
                       {.backend = "gloop", .world_size = 1, .rank = 0});
    FAIL() << "no error";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("\"gloop\""), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("hybrid"), std::string::npos);
  }
  EXPECT_FALSE(is_initialized());
}

}  // namespace
}  // namespace lockstep
