#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "ddp_support.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/memory/memory.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using test::formula;
using test::loss_of;
using test::mlp;
using testing::run_ranks;

struct Report {
  torch::Tensor value;
  int answer;
};

/// Many kinds of arguments and results.
struct ManyImpl : torch::nn::Module {
  ManyImpl() : linear(register_module("linear", torch::nn::Linear(2, 2))) {}
  std::tuple<torch::Tensor, int> forward(const torch::Tensor& x, int times) {
    return {linear(x) * times, times};
  }
  Report forward(const torch::Tensor& x) { return {linear(x), 42}; }
  std::vector<torch::Tensor> forward(std::unique_ptr<torch::Tensor> x) {
    return {linear(*x), linear(*x)};
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Many);

struct TimesImpl : torch::nn::Module {
  TimesImpl() : linear(register_module("linear", torch::nn::Linear(2, 2))) {}
  std::tuple<torch::Tensor, int> forward(torch::Tensor x) {
    return {linear(x) * 5, 5};
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Times);

/// A callable that is no torch::nn::Module.
struct Callable {
  torch::Tensor weight = torch::ones({2, 2}, torch::requires_grad());
  std::vector<torch::Tensor> parameters() const { return {weight}; }
  torch::Tensor operator()(const torch::Tensor& x) const {
    return x.matmul(weight);
  }
};

/// The gradient of every parameter is rank + 1 before averaging.
template <class Model>
void expect_averaged(Model& model, int n) {
  const float mean = static_cast<float>(n + 1) / 2;
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(
        torch::equal(parameter.grad(), torch::full_like(parameter, mean)));
  }
}

at::Tensor input_of(int rank) {
  // One row: the gradients of x W' + b summed are x and 1.
  return torch::full({1, 2}, rank + 1.0F);
}

TEST(DdpModules, AnyArgumentsAndResults) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int rank) {
      auto model = DistributedDataParallel(Many());
      static_assert(std::is_same_v<decltype(model->module()), Many&>);
      const auto [value, times] = model->forward(input_of(rank), 3);
      EXPECT_EQ(times, 3);
      value.sum().backward();
      const auto report = model->forward(input_of(rank));
      EXPECT_EQ(report.answer, 42);
      report.value.sum().backward();
      const auto outputs =
          model->forward(std::make_unique<torch::Tensor>(input_of(rank)));
      EXPECT_EQ(outputs.size(), 2u);
      outputs[1].sum().backward();
    });
  }
}

TEST(DdpModules, KindsOfModules) {
  for (const int n : {1, 2}) {
    run_ranks(n, [n](int rank) {
      const auto scale = static_cast<float>(rank + 1);
      const auto ones = torch::ones({1, 2});
      auto shared = DistributedDataParallel(
          std::make_shared<torch::nn::LinearImpl>(2, 2));
      (shared->forward(ones) * scale).sum().backward();
      expect_averaged(shared, n);

      auto any = DistributedDataParallel(
          torch::nn::AnyModule(torch::nn::Linear(2, 2)));
      (any->forward(ones) * scale).sum().backward();
      expect_averaged(any, n);

      auto callable = DistributedDataParallel(Callable());
      (callable->forward(ones) * scale).sum().backward();
      expect_averaged(callable, n);

      torch::jit::Module script("script");
      script.register_parameter(
          "weight", torch::ones({2, 2}, torch::requires_grad()), false);
      script.define("def forward(self, x):\n  return x.matmul(self.weight)\n");
      auto jit = DistributedDataParallel(script);
      const auto output =
          jit->forward(std::vector<torch::jit::IValue>{ones}).toTensor();
      (output * scale).sum().backward();
      expect_averaged(jit, n);

      torch::nn::Sequential one(Times{});
      auto typed = DistributedDataParallel(one);
      const auto [value, times] =
          typed->forward<std::tuple<torch::Tensor, int>>(ones);
      EXPECT_EQ(times, 5);
      (value / 5 * scale).sum().backward();
      expect_averaged(typed, n);
    });
  }
}

TEST(DdpModules, NamesAndModulesPassThrough) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      auto net = mlp();
      auto model = DistributedDataParallel(net);
      EXPECT_EQ(model->named_parameters().keys(),
                net->named_parameters().keys());
      EXPECT_EQ(model->named_buffers().size(), 0u);
      EXPECT_EQ(model->parameters().size(), 4u);
      EXPECT_EQ(model->module().get(), net.get());
      auto copy = model;
      copy->eval();
      EXPECT_FALSE(model->is_training());
      const auto scope = model->no_sync();
    });
  }
}

TEST(DdpModules, ForEachTensorFindsThemInAnyNesting) {
  const auto one = torch::full({}, 1);
  const auto count = [](const auto& value) {
    int64_t sum = 0;
    nn::for_each_tensor(value,
                        [&](const at::Tensor& t) { sum += t.item<int64_t>(); });
    return sum;
  };
  EXPECT_EQ(count(one), 1);
  EXPECT_EQ(count(std::tuple{one, 3, std::pair{one, std::string("text")}}), 2);
  EXPECT_EQ(count(std::vector<std::vector<at::Tensor>>{{one}, {one, one}}), 3);
  EXPECT_EQ(count(std::map<std::string, at::Tensor>{{"a", one}, {"b", one}}),
            2);
  EXPECT_EQ(count(std::optional<at::Tensor>{}), 0);
  EXPECT_EQ(count(std::optional{std::array{one, one}}), 2);
  EXPECT_EQ(count(c10::IValue(one)), 1);
  EXPECT_EQ(count(c10::IValue(3)), 0);
  EXPECT_EQ(count(Report{one, 1}), 0);
}

}  // namespace
}  // namespace lockstep
