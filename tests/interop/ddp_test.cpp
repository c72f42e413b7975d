#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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
constexpr int kSteps = 20;
constexpr int64_t kBatch = 64;
constexpr double kTolerance = 1e-6;

at::Tensor formula(at::IntArrayRef sizes, double seed = 0) {
  const auto i = torch::arange(c10::multiply_integers(sizes), torch::kDouble);
  return torch::sin(i * 0.37 + seed).to(torch::kFloat).view(sizes);
}

/// The program of ddp_oracle.py.
LOCKSTEP_PROCESS(train_the_seed_model) {
  init_process_group();
  torch::nn::Sequential net(
      torch::nn::Linear(10, 50), torch::nn::ReLU(), torch::nn::Linear(50, 10));
  {
    const torch::NoGradGuard no_grad;
    double seed = 0;
    for (auto& parameter : net->parameters()) {
      parameter.copy_(formula(parameter.sizes(), ++seed) * 0.3);
    }
  }
  auto model = DistributedDataParallel(net);
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  const int64_t rows = kBatch / get_world_size();
  const auto inputs = formula({kBatch, 10}).narrow(0, get_rank() * rows, rows);
  const auto labels =
      (torch::arange(kBatch) % 10).narrow(0, get_rank() * rows, rows);
  std::vector<float> losses;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    auto loss =
        torch::nn::functional::cross_entropy(model->forward(inputs), labels);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<float>());
  }
  std::vector<float> parameters;
  for (const auto& parameter : net->parameters()) {
    const auto flat = parameter.detach().flatten();
    const auto* values = flat.data_ptr<float>();
    parameters.insert(parameters.end(), values, values + flat.numel());
  }
  const nlohmann::json report = {{"losses", losses},
                                 {"parameters", parameters}};
  std::printf("%s\n", report.dump().c_str());
  destroy_process_group();
  return 0;
}

using Values = std::vector<double>;

Values values_of(const Result& result, const char* key) {
  EXPECT_TRUE(result.ok()) << result;
  if (!result.ok()) return {};
  return nlohmann::json::parse(result.out).at(key).get<Values>();
}

void expect_near(const Values& actual, const Values& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], kTolerance) << "value " << i;
  }
}

Command oracle() {
  return {.argv = {std::getenv("LOCKSTEP_PYTHON"),
                   std::string(std::getenv("LOCKSTEP_PYTHON_SCRIPTS")) +
                       "/ddp_oracle.py"}};
}

TEST(DdpInterop, TheSeedModelTrainsAsInPython) {
  const auto one_process = run(oracle(), 120s);
  Ranks python({oracle(), oracle()});
  const auto expected = python.wait(120s);
  for (const char* backend : kBackends) {
    Ranks ours(2, "train_the_seed_model", {{"LOCKSTEP_BACKEND", backend}});
    const auto actual = ours.wait();
    for (size_t rank = 0; rank < 2; ++rank) {
      expect_near(values_of(actual[rank], "losses"),
                  values_of(expected[rank], "losses"));
      expect_near(values_of(actual[rank], "parameters"),
                  values_of(expected[rank], "parameters"));
      expect_near(values_of(actual[rank], "parameters"),
                  values_of(one_process, "parameters"));
    }
    Values mean = values_of(actual[0], "losses");
    const Values other = values_of(actual[1], "losses");
    for (size_t i = 0; i < mean.size(); ++i) mean[i] = (mean[i] + other[i]) / 2;
    expect_near(mean, values_of(one_process, "losses"));
  }
  const auto alone = run(at_entry("train_the_seed_model"));
  expect_near(values_of(alone, "losses"), values_of(one_process, "losses"));
  expect_near(values_of(alone, "parameters"),
              values_of(one_process, "parameters"));
}

}  // namespace
}  // namespace lockstep::test
