#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "core/clock.h"
#include "ddp_support.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using test::formula;
using test::gradients;
using test::loss_of;
using test::message_of;
using test::share;
using testing::run_ranks;
using namespace std::chrono_literals;

constexpr int64_t kRows = 4;
/// Over a backend each gradient is sent by itself.
const DistributedDataParallelOptions kOneByOne = {.bucket_cap_mb = 1e-6};

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

std::function<void()> before_trap;

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
      if (before_trap) before_trap();
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
  /// `late`: the trap is behind all gradients.
  torch::Tensor forward(const torch::Tensor& x,
                        bool armed = false,
                        bool late = false) {
    if (x.size(1) != 6)
      throw std::invalid_argument("a user's error in forward");
    if (late) {
      const auto input = x.clone().set_requires_grad(true);
      return second(torch::tanh(first(Trap::apply(input, armed))));
    }
    return second(Trap::apply(torch::tanh(first(x)), armed));
  }
  torch::nn::Linear first;
  torch::nn::Linear second;
};

class DdpAbandoned : public ::testing::TestWithParam<std::string> {
 protected:
  void ranks(int n, const std::function<void(int)>& fn) {
    run_ranks(n, fn, {.backend = GetParam(), .timeout = 20s});
  }
};
INSTANTIATE_TEST_SUITE_P(Backends,
                         DdpAbandoned,
                         ::testing::ValuesIn(test::kDdpBackends),
                         [](const auto& one) { return one.param; });

void expect_same_on_all(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    auto reference = parameter.grad().clone();
    broadcast(reference);
    EXPECT_TRUE(torch::equal(reference, parameter.grad()));
  }
}

TEST_P(DdpAbandoned, ParametersWithoutGradientAreNamedOnEveryRank) {
  std::atomic<int> named{0};
  ranks(2, [&](int) {
    auto model =
        DistributedDataParallel(std::make_shared<Branches>(), kOneByOne);
    auto loss = loss_of(model->forward(formula({kRows, 6}), true, false));
    const auto text = message_of<InvalidArgument>([&] { loss.backward(); });
    EXPECT_NE(text.find("\"B.weight\", \"B.bias\""), std::string::npos) << text;
    ++named;
  });
  EXPECT_EQ(named, 2);
}

TEST_P(DdpAbandoned, AllNameTheSameRankAmongThree) {
  constexpr int kCulprit = 2;
  std::atomic<int> named{0};
  ranks(3, [&](int rank) {
    auto model =
        DistributedDataParallel(std::make_shared<Branches>(), kOneByOne);
    auto loss =
        loss_of(model->forward(formula({kRows, 6}), true, rank != kCulprit));
    // Comes when the culprit and the first to notice have given up.
    if (rank == 1) std::this_thread::sleep_for(200ms);
    try {
      loss.backward();
      ADD_FAILURE() << "rank " << rank;
    } catch (const MismatchError& error) {
      EXPECT_EQ(error.context().peers, std::vector<int>{kCulprit}) << rank;
      EXPECT_NE(error.message().find("\"B.weight\""), std::string::npos)
          << error.what();
      ++named;
    } catch (const InvalidArgument&) {
      EXPECT_EQ(rank, kCulprit);
      ++named;
    }
    for (auto& parameter : model->parameters()) {
      parameter.mutable_grad().reset();
    }
    loss_of(model->forward(formula({kRows, 6}, rank), true, true)).backward();
    expect_same_on_all(model->parameters());
  });
  EXPECT_EQ(named, 3);
}

TEST_P(DdpAbandoned, AParameterWithoutGradientOnOneRankIsNamedOnBoth) {
  std::atomic<int> named{0};
  ranks(2, [&](int rank) {
    auto model =
        DistributedDataParallel(std::make_shared<Branches>(), kOneByOne);
    auto loss = loss_of(model->forward(formula({kRows, 6}), true, rank == 0));
    const auto text = message_of<Error>([&] { loss.backward(); });
    EXPECT_NE(text.find("\"B.weight\""), std::string::npos) << text;
    ++named;
    for (auto& parameter : model->parameters()) {
      parameter.mutable_grad().reset();
    }
    loss_of(model->forward(formula({kRows, 6}, rank), true, true)).backward();
    expect_same_on_all(model->parameters());
  });
  EXPECT_EQ(named, 2);
}

TEST_P(DdpAbandoned, AUsersErrorLeavesTheWrapperUsable) {
  const auto batch = formula({2 * kRows, 6});
  auto net = std::make_shared<Trapped>();
  loss_of(net->forward(batch)).backward();
  const auto expected = gradients(net->parameters());
  ranks(2, [&](int rank) {
    auto model =
        DistributedDataParallel(std::make_shared<Trapped>(), kOneByOne);
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

TEST_P(DdpAbandoned, APassThatEndsOnOneRankFailsOnTheOthersAtOnce) {
  const auto batch = formula({2 * kRows, 6});
  ranks(2, [&](int rank) {
    auto model =
        DistributedDataParallel(std::make_shared<Trapped>(), kOneByOne);
    const auto input = share(batch, rank, kRows);
    for (int round = 0; round < 3; ++round) {
      for (const int culprit : {0, 1}) {
        auto loss = loss_of(model->forward(input, rank == culprit));
        if (rank == culprit) {
          EXPECT_THROW(loss.backward(), std::runtime_error);
        } else {
          const auto text = message_of<MismatchError>([&] { loss.backward(); });
          EXPECT_NE(text.find("rank " + std::to_string(culprit)),
                    std::string::npos)
              << text;
        }
        for (auto& parameter : model->parameters()) {
          parameter.mutable_grad().reset();
        }
        loss_of(model->forward(input)).backward();
        expect_same_on_all(model->parameters());
      }
    }
  });
}

TEST_P(DdpAbandoned, APassThatEndsWhenTheOthersAreDoneFailsTheNextOnAll) {
  const auto batch = formula({2 * kRows, 6});
  std::atomic<int> averaged{0};
  std::atomic<int> trapped{0};
  before_trap = [&] {
    const Deadline deadline(20s);
    const int round = ++trapped;
    while (averaged < round && !deadline.passed()) {
      std::this_thread::sleep_for(1ms);
    }
  };
  ranks(2, [&](int rank) {
    auto model =
        DistributedDataParallel(std::make_shared<Trapped>(), kOneByOne);
    const auto input = share(batch, rank, kRows);
    for (const int culprit : {0, 1, 0}) {
      auto loss = loss_of(model->forward(input, rank == culprit, true));
      if (rank == culprit) {
        EXPECT_THROW(loss.backward(), std::runtime_error);
      } else {
        loss.backward();
        ++averaged;
      }
      loss = loss_of(model->forward(input));
      const auto text = message_of<MismatchError>([&] { loss.backward(); });
      EXPECT_NE(text.find("on rank " + std::to_string(culprit) +
                          " after other ranks could average"),
                std::string::npos)
          << text;
      for (auto& parameter : model->parameters()) {
        parameter.mutable_grad().reset();
      }
      loss_of(model->forward(input)).backward();
      expect_same_on_all(model->parameters());
    }
  });
  before_trap = nullptr;
}

}  // namespace
}  // namespace lockstep
