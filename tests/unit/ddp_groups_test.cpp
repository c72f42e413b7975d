#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

torch::nn::Linear linear(int rank, int outputs = 1) {
  torch::nn::Linear module(3, outputs);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.fill_(rank);
  return module;
}

at::Tensor input(int rank) {
  return torch::arange(3, at::kFloat) + 10 * rank;
}

class DdpGroups : public ::testing::TestWithParam<const char*> {};

TEST_P(DdpGroups, AverageWithinTheGroup) {
  testing::run_ranks(
      4,
      [](int rank) {
        // {1, 0} and {3, 2}: rank 0 of a group is the odd global one.
        const auto groups = {new_group({1, 0}, {.sort_ranks = false}),
                             new_group({3, 2}, {.sort_ranks = false})};
        const auto& group = rank < 2 ? *groups.begin() : *(groups.end() - 1);
        const int root = rank | 1;
        DistributedDataParallel model(linear(rank), {.process_group = group});
        for (const auto& parameter : model->parameters()) {
          EXPECT_TRUE(parameter.eq(root).all().item<bool>()) << parameter;
        }
        for (int step = 0; step < 3; ++step) {
          model->module()->zero_grad();
          model->forward(input(rank)).sum().backward();
          const auto expected = (input(root) + input(root - 1)) / 2;
          const auto gradient = model->parameters()[0].grad();
          EXPECT_TRUE(gradient.allclose(expected.unsqueeze(0))) << gradient;
        }
        barrier();
      },
      {.backend = GetParam()});
}

TEST_P(DdpGroups, ErrorsNameGlobalRanks) {
  testing::run_ranks(
      4,
      [](int rank) {
        const auto group = new_group({1, 3});
        const auto wrap = [&] {
          DistributedDataParallel model(linear(rank, rank == 3 ? 2 : 1),
                                        {.process_group = group});
        };
        try {
          wrap();
          ADD_FAILURE() << "no error";
        } catch (const MismatchError& error) {
          EXPECT_EQ(rank % 2, 1);
          const std::string text = error.what();
          EXPECT_NE(text.find("rank 1 has"), std::string::npos) << text;
          EXPECT_NE(text.find("rank 3 has"), std::string::npos) << text;
          EXPECT_EQ(error.context().peers, std::vector<int>{3});
        } catch (const InvalidArgument& error) {
          EXPECT_EQ(rank % 2, 0);
          const std::string text = error.what();
          EXPECT_NE(text.find("does not belong"), std::string::npos) << text;
        }
        barrier();
      },
      {.backend = GetParam()});
}

INSTANTIATE_TEST_SUITE_P(Shm, DdpGroups, ::testing::Values("shm"));
#ifdef LOCKSTEP_HAS_GLOO
INSTANTIATE_TEST_SUITE_P(Gloo, DdpGroups, ::testing::Values("gloo"));
#endif

}  // namespace
}  // namespace lockstep
