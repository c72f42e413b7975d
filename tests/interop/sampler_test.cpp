// Orders of samplers and loader against PyTorch's own.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "support/python.h"

namespace lockstep::data {
namespace {

using Order = std::vector<int64_t>;

Order to_vector(const at::Tensor& t) {
  return {t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel()};
}

class SamplerInterop : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    orders_ = nlohmann::json::parse(test::run_python("sampler_orders.py"));
  }
  static inline nlohmann::json orders_;
};

TEST_F(SamplerInterop, DistributedSamplerHasPythonsOrder) {
  const auto& cases = orders_["distributed"];
  ASSERT_GE(cases.size(), 200u);
  for (const auto& c : cases) {
    DistributedSampler sampler(c["length"],
                               {.num_replicas = c["num_replicas"].get<int>(),
                                .rank = c["rank"].get<int>(),
                                .shuffle = c["shuffle"],
                                .seed = c["seed"],
                                .drop_last = c["drop_last"]});
    sampler.set_epoch(c["epoch"]);
    EXPECT_EQ(sampler.size(), c["size"]) << c;
    EXPECT_EQ(to_vector(sampler.next_pass()), c["order"].get<Order>()) << c;
  }
}

TEST_F(SamplerInterop, RandomSamplerHasPythonsOrder) {
  for (const auto& c : orders_["random"]) {
    RandomSamplerOptions options{.replacement = c["replacement"],
                                 .generator = make_generator(5)};
    if (!c["num_samples"].is_null()) options.num_samples = c["num_samples"];
    RandomSampler sampler(c["length"], options);
    for (const auto& pass : c["passes"]) {
      EXPECT_EQ(to_vector(sampler.next_pass()), pass.get<Order>()) << c;
    }
  }
}

TEST_F(SamplerInterop, ShufflingLoaderHasPythonsBatches) {
  for (const auto& c : orders_["loader"]) {
    torch::manual_seed(11);
    DataLoaderOptions options{.batch_size = 4, .shuffle = true};
    if (c["generator"]) options.generator = make_generator(7);
    auto loader = DataLoader(TensorDataset(torch::arange(10)), options);
    for (const auto& pass : c["passes"]) {
      std::vector<Order> batches;
      for (auto& [batch] : loader) batches.push_back(to_vector(batch));
      EXPECT_EQ(batches, pass.get<std::vector<Order>>()) << c;
    }
    // The default generator was used as often as Python uses it.
    EXPECT_EQ(torch::rand({1}, torch::kDouble).item<double>(),
              c["next_random"].get<double>());
  }
}

}  // namespace
}  // namespace lockstep::data
