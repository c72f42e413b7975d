#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "support/multiprocess.h"

namespace lockstep::test {
namespace {

const std::vector<const char*> kBackends = {
    "shm",
#ifdef LOCKSTEP_HAS_GLOO
    "gloo",
#endif
};

int number(const char* name) {
  return std::atoi(std::getenv(name));
}

/// Trains until a peer is lost, and says which.
LOCKSTEP_PROCESS(train_until_a_peer_is_lost) {
  init_process_group({.timeout = std::chrono::seconds(30)});
  const int64_t width = number("WIDTH");
  torch::nn::Sequential net(torch::nn::Linear(10, width),
                            torch::nn::ReLU(),
                            torch::nn::Linear(width, width),
                            torch::nn::ReLU(),
                            torch::nn::Linear(width, 10));
  auto model = DistributedDataParallel(net, {.arena = number("ARENA") == 1});
  torch::optim::SGD optimizer(model->parameters(), 1e-3);
  const auto input = torch::ones({16, 10});
  try {
    for (int step = 0;; ++step) {
      optimizer.zero_grad();
      model->forward(input).sum().backward();
      optimizer.step();
      if (step == 2) {
        std::printf("training\n");
        std::fflush(stdout);
      }
    }
  } catch (const PeerLost& error) {
    std::printf(
        "lost rank %d: %s\n", error.context().peers.at(0), error.what());
  }
  // Gradients can be read and dropped after a failure.
  for (auto& parameter : model->parameters()) {
    if (parameter.grad().defined()) (void)parameter.grad().sum();
  }
  optimizer.zero_grad();
  destroy_process_group();
  return 0;
}

struct KillCase {
  const char* name;
  const char* backend;
  const char* arena;
  const char* width;
};

const std::vector<KillCase> kKillCases = {
    {"small", "shm", "0", "64"},
    {"copying", "shm", "0", "700"},
    {"arena", "shm", "1", "700"},
#ifdef LOCKSTEP_HAS_GLOO
    {"gloo", "gloo", "0", "300"},
#endif
};

class DdpKill : public ::testing::TestWithParam<KillCase> {};
INSTANTIATE_TEST_SUITE_P(Cases,
                         DdpKill,
                         ::testing::ValuesIn(kKillCases),
                         [](const auto& one) {
                           return std::string(one.param.name);
                         });

TEST_P(DdpKill, SurvivorsNameTheRankThatDiedDuringTraining) {
  const auto before = shared_memory_files();
  for (int round = 0; round < 5; ++round) {
    const int victim = round % 3;
    Ranks ranks(3,
                "train_until_a_peer_is_lost",
                {{"LOCKSTEP_BACKEND", GetParam().backend},
                 {"ARENA", GetParam().arena},
                 {"WIDTH", GetParam().width}});
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(ranks[rank].wait_for_output("training\n"));
    }
    const auto start = std::chrono::steady_clock::now();
    ranks[victim].signal(SIGKILL);
    const std::string expected = "lost rank " + std::to_string(victim);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(ranks[rank].wait_for_output(expected)) << ranks[rank].out();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 2s);
    const auto results = ranks.wait();
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(results[rank].ok(), rank != victim) << results[rank];
    }
  }
  EXPECT_EQ(shared_memory_files(), before);
}

LOCKSTEP_PROCESS(wrap_models_that_differ) {
  init_process_group({.timeout = std::chrono::seconds(30)});
  torch::nn::Sequential net(torch::nn::Linear(4, number("RANK") == 1 ? 3 : 2));
  try {
    DistributedDataParallel model(net);
  } catch (const MismatchError& error) {
    std::printf("%s\n", error.what());
  }
  destroy_process_group();
  return 0;
}

TEST(Ddp, ModelsThatDifferAreRefusedByEveryProcess) {
  for (const char* backend : kBackends) {
    Ranks ranks(2, "wrap_models_that_differ", {{"LOCKSTEP_BACKEND", backend}});
    for (const auto& result : ranks.wait()) {
      EXPECT_TRUE(result.ok()) << result;
      EXPECT_NE(result.out.find("\"0.weight\" (Float [2, 4]"),
                std::string::npos)
          << result;
      EXPECT_NE(result.out.find("(Float [3, 4]"), std::string::npos) << result;
    }
  }
}

}  // namespace
}  // namespace lockstep::test
