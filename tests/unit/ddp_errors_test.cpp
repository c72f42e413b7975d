#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "ddp_support.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using test::formula;
using test::gradients;
using test::loss_of;
using test::mlp;
using test::share;
using testing::run_ranks;

constexpr int64_t kRows = 4;

template <class E, class Fn>
std::string message_of(const Fn& fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "the expected error was not thrown";
  return {};
}

/// Two branches, of which a forward uses one.
struct Branches : torch::nn::Module {
  Branches()
      : a(register_module("A", torch::nn::Linear(6, 2))),
        b(register_module("B", torch::nn::Linear(6, 2))) {}
  torch::Tensor forward(const torch::Tensor& x, bool use_a, bool use_b) {
    auto result = torch::zeros({x.size(0), 2});
    if (use_a) result = result + a(x);
    if (use_b) result = result + b(x);
    return result;
  }
  torch::nn::Linear a;
  torch::nn::Linear b;
};

/// Throws in its backward pass where asked to.
struct Trap : torch::autograd::Function<Trap> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& x,
                               bool armed) {
    context->saved_data["armed"] = armed;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    if (context->saved_data["armed"].toBool()) {
      throw std::runtime_error("a user's error in backward");
    }
    return {gradients[0], torch::Tensor()};
  }
};

struct Trapped : torch::nn::Module {
  Trapped()
      : first(register_module("first", torch::nn::Linear(6, 5))),
        second(register_module("second", torch::nn::Linear(5, 3))) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(formula(parameter.sizes(), 4));
    }
  }
  torch::Tensor forward(const torch::Tensor& x, bool armed = false) {
    if (x.size(1) != 6)
      throw std::invalid_argument("a user's error in forward");
    return second(Trap::apply(torch::tanh(first(x)), armed));
  }
  torch::nn::Linear first;
  torch::nn::Linear second;
};

class DdpErrorsOver : public ::testing::TestWithParam<std::string> {
 protected:
  void ranks(int n, const std::function<void(int)>& fn) {
    run_ranks(
        n, fn, {.backend = GetParam(), .timeout = std::chrono::seconds(20)});
  }
};
INSTANTIATE_TEST_SUITE_P(Backends,
                         DdpErrorsOver,
                         ::testing::ValuesIn(test::kDdpBackends),
                         [](const auto& one) { return one.param; });

TEST_P(DdpErrorsOver, ParametersWithoutGradientAreNamedOnEveryRank) {
  std::atomic<int> named{0};
  ranks(2, [&](int) {
    auto model = DistributedDataParallel(std::make_shared<Branches>());
    auto loss = loss_of(model->forward(formula({kRows, 6}), true, false));
    const auto text = message_of<InvalidArgument>([&] { loss.backward(); });
    EXPECT_NE(text.find("\"B.weight\", \"B.bias\""), std::string::npos) << text;
    ++named;
  });
  EXPECT_EQ(named, 2);
}

TEST_P(DdpErrorsOver, AParameterWithoutGradientOnOneRankIsNamedOnBoth) {
  std::atomic<int> named{0};
  ranks(2, [&](int rank) {
    auto model = DistributedDataParallel(std::make_shared<Branches>());
    auto loss = loss_of(model->forward(formula({kRows, 6}), true, rank == 0));
    const auto text = message_of<Error>([&] { loss.backward(); });
    EXPECT_NE(text.find("\"B.weight\""), std::string::npos) << text;
    ++named;
    // A rank that destroys its group says so, which would be the news then.
    const auto start = std::chrono::steady_clock::now();
    while (named < 2 && std::chrono::steady_clock::now() - start <
                            std::chrono::seconds(20)) {
      std::this_thread::yield();
    }
  });
  EXPECT_EQ(named, 2);
}

TEST_P(DdpErrorsOver, AUsersErrorLeavesTheWrapperUsable) {
  const auto batch = formula({2 * kRows, 6});
  auto net = std::make_shared<Trapped>();
  loss_of(net->forward(batch)).backward();
  const auto expected = gradients(net->parameters());
  ranks(2, [&](int rank) {
    auto model = DistributedDataParallel(std::make_shared<Trapped>());
    const auto input = share(batch, rank, kRows);
    for (int round = 0; round < 3; ++round) {
      EXPECT_THROW((void)model->forward(formula({kRows, 5})),
                   std::invalid_argument);
      // Between forward and backward.
      (void)model->forward(input);
      auto loss = loss_of(model->forward(input, true));
      // In the middle of backward, when some gradients are on their way.
      EXPECT_THROW(loss.backward(), std::runtime_error);
      for (auto& parameter : model->parameters())
        parameter.mutable_grad().reset();
      loss_of(model->forward(input)).backward();
      const auto actual = gradients(model->parameters());
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_TRUE(torch::allclose(actual[i], expected[i], 0, 1e-6));
      }
    }
  });
}

TEST(DdpErrors, APassThatEndsOnOneRankFailsOnTheOthersAtOnce) {
  const auto batch = formula({2 * kRows, 6});
  run_ranks(
      2,
      [&](int rank) {
        auto model = DistributedDataParallel(std::make_shared<Trapped>());
        const auto input = share(batch, rank, kRows);
        for (int round = 0; round < 3; ++round) {
          for (const int culprit : {0, 1}) {
            auto loss = loss_of(model->forward(input, rank == culprit));
            if (rank == culprit) {
              EXPECT_THROW(loss.backward(), std::runtime_error);
            } else {
              const auto text =
                  message_of<MismatchError>([&] { loss.backward(); });
              EXPECT_NE(text.find("rank " + std::to_string(culprit)),
                        std::string::npos)
                  << text;
            }
            for (auto& parameter : model->parameters()) {
              parameter.mutable_grad().reset();
            }
            loss_of(model->forward(input)).backward();
            auto reference = model->parameters()[0].grad().clone();
            broadcast(reference);
            EXPECT_TRUE(torch::equal(reference, model->parameters()[0].grad()));
          }
        }
      },
      {.backend = "shm"});
}

TEST(DdpErrors, APeerThatLeavesOrIsLateIsNamed) {
  run_ranks(2,
            [](int rank) {
              auto model = DistributedDataParallel(mlp());
              if (rank == 1) return;
              auto loss = loss_of(model->forward(formula({kRows, 6})));
              const auto text = message_of<PeerLost>([&] { loss.backward(); });
              EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
              auto again = loss_of(model->forward(formula({kRows, 6})));
              EXPECT_THROW(again.backward(), InvalidArgument);
            },
            {.backend = "shm"});
  std::atomic<bool> timed_out{false};
  run_ranks(2,
            [&](int rank) {
              auto model = DistributedDataParallel(mlp());
              if (rank == 1) {
                while (!timed_out) std::this_thread::yield();
                return;
              }
              auto loss = loss_of(model->forward(formula({kRows, 6})));
              const auto text =
                  message_of<TimeoutError>([&] { loss.backward(); });
              EXPECT_NE(text.find("rank 1 did not arrive"), std::string::npos)
                  << text;
              timed_out = true;
            },
            {.backend = "shm", .timeout = std::chrono::milliseconds(300)});
}

TEST_P(DdpErrorsOver, WhatCannotBeAveragedIsRefused) {
  ranks(2, [](int) {
    auto model = DistributedDataParallel(mlp());
    const auto input = formula({kRows, 6}).set_requires_grad(true);
    auto loss = loss_of(model->forward(input));
    EXPECT_THROW(loss.backward({}, true, /*create_graph=*/true), Unsupported);
    // The inner derivative is the module's own business.
    for (auto& parameter : model->parameters())
      parameter.mutable_grad().reset();
    loss = loss_of(model->forward(input));
    const auto inner = torch::autograd::grad(
        {loss}, {input}, /*grad_outputs=*/{}, true, /*create_graph=*/true);
    (loss + inner[0].pow(2).sum()).backward();

    torch::nn::Sequential sparse(
        torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true)));
    auto embedding = DistributedDataParallel(sparse);
    auto sum = embedding->forward(torch::arange(3)).sum();
    const auto text = message_of<Unsupported>([&] { sum.backward(); });
    EXPECT_NE(text.find("\"0.weight\" has a sparse gradient"),
              std::string::npos)
        << text;
  });
}

TEST(DdpErrors, ArgumentsOfTheWrapper) {
  EXPECT_THROW(DistributedDataParallel{mlp()}, InvalidArgument);  // no group
  run_ranks(2, [](int) {
    torch::nn::Sequential frozen(torch::nn::Linear(2, 2));
    for (auto& parameter : frozen->parameters()) {
      parameter.set_requires_grad(false);
    }
    EXPECT_THROW(DistributedDataParallel{frozen}, InvalidArgument);
    torch::nn::Sequential empty;
    EXPECT_THROW(DistributedDataParallel{empty}, InvalidArgument);
    EXPECT_THROW((DistributedDataParallel{mlp(), {.bucket_cap_mb = 0}}),
                 InvalidArgument);

    auto net = mlp();
    { const DistributedDataParallel gone(net); }
    auto model = DistributedDataParallel(net);
    loss_of(model->forward(formula({kRows, 6}))).backward();
    const auto text = message_of<InvalidArgument>(
        [&] { DistributedDataParallel twice(net); });
    EXPECT_NE(text.find("\"0.weight\" belongs to another"), std::string::npos)
        << text;
    EXPECT_NO_THROW(model->to(torch::kCPU));
    EXPECT_NO_THROW(model->to(torch::kCPU, torch::kFloat));
    EXPECT_THROW(model->to(torch::kDouble), InvalidArgument);
    EXPECT_THROW(model->to(torch::kMeta), InvalidArgument);
  });
}

}  // namespace
}  // namespace lockstep
