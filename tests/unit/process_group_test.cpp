#include <gtest/gtest.h>

#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

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
