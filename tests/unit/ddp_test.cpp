#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <map>
#include <mutex>

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
using test::message_of;
using test::mlp;
using test::share;
using testing::run_ranks;

constexpr int64_t kRows = 4;

/// The gradients of one process on the whole batch.
template <class Net>
std::vector<at::Tensor> whole_batch(Net net, const at::Tensor& batch) {
  loss_of(net->forward(batch)).backward();
  return gradients(net->parameters());
}

void expect_close(const std::vector<at::Tensor>& actual,
                  const std::vector<at::Tensor>& expected,
                  double tolerance = 1e-6) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 0, tolerance))
        << "parameter " << i << ", greatest difference "
        << (actual[i] - expected[i]).abs().max();
  }
}

/// Whether all ranks hold the same bits.
void expect_same_on_all_ranks(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    auto reference = tensor.clone();
    broadcast(reference);
    EXPECT_TRUE(torch::equal(tensor, reference));
  }
}

class DdpOver : public ::testing::TestWithParam<std::string> {
 protected:
  void ranks(int n, const std::function<void(int)>& fn) {
    run_ranks(
        n, fn, {.backend = GetParam(), .timeout = std::chrono::seconds(20)});
  }
};
INSTANTIATE_TEST_SUITE_P(Backends,
                         DdpOver,
                         ::testing::ValuesIn(test::kDdpBackends),
                         [](const auto& one) { return one.param; });

TEST_P(DdpOver, GradientsEqualOneProcessOnTheWholeBatch) {
  for (const int n : {2, 3}) {
    const auto batch = formula({n * kRows, 6});
    const auto expected = whole_batch(mlp(), batch);
    ranks(n, [&](int rank) {
      auto model = DistributedDataParallel(mlp());
      for (int step = 0; step < 3; ++step) {
        for (auto& parameter : model->parameters())
          parameter.mutable_grad().reset();
        loss_of(model->forward(share(batch, rank, kRows))).backward();
        expect_close(gradients(model->parameters()), expected);
        expect_same_on_all_ranks(gradients(model->parameters()));
      }
    });
  }
}

TEST_P(DdpOver, LargeGradientsAndManySmallOnes) {
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 300), torch::nn::Tanh());
    net->push_back(torch::nn::Linear(300, 500));
    for (int i = 0; i < 40; ++i)
      net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({500})));
    net->push_back(torch::nn::Linear(500, 700));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      parameter.copy_(formula(parameter.sizes(), 1) * 0.1);
    }
    return net;
  };
  const auto batch = formula({2 * kRows, 6});
  const auto expected = whole_batch(make(), batch);
  ranks(2, [&](int rank) {
    auto model = DistributedDataParallel(make(), {.bucket_cap_mb = 0.5});
    for (int step = 0; step < 3; ++step) {
      for (auto& parameter : model->parameters())
        parameter.mutable_grad().reset();
      loss_of(model->forward(share(batch, rank, kRows))).backward();
      expect_close(gradients(model->parameters()), expected, 1e-5);
    }
  });
}

TEST_P(DdpOver, OtherDtypes) {
  for (const auto dtype : {torch::kDouble, torch::kBFloat16}) {
    ranks(2, [&](int rank) {
      auto net = mlp();
      net->to(dtype);
      auto model = DistributedDataParallel(net);
      auto scale = static_cast<double>(rank + 1);
      // The sum of a weight times a constant: its gradient is the constant.
      at::Tensor loss = torch::zeros({}, dtype);
      (void)model->forward(torch::zeros({1, 6}, dtype));
      for (auto& parameter : model->parameters()) {
        loss = loss + parameter.sum() * scale;
      }
      loss.backward();
      for (auto& parameter : model->parameters()) {
        EXPECT_TRUE(
            torch::equal(parameter.grad(), torch::full_like(parameter, 1.5)));
      }
    });
  }
}

TEST_P(DdpOver, TheSumOfHalfGradientsMayBeBeyondTheirRange) {
  for (const bool interop : {false, true}) {
    if (interop && GetParam() != "gloo") continue;
    run_ranks(2,
              [](int) {
                auto net = mlp();
                net->to(torch::kHalf);
                auto model = DistributedDataParallel(net);
                (void)model->forward(torch::zeros({1, 6}, torch::kHalf));
                at::Tensor loss = torch::zeros({}, torch::kHalf);
                for (auto& parameter : model->parameters()) {
                  loss = loss + parameter.sum() * 60000;
                }
                loss.backward();
                for (auto& parameter : model->parameters()) {
                  EXPECT_TRUE(torch::equal(parameter.grad(),
                                           torch::full_like(parameter, 60000)));
                }
              },
              {.backend = GetParam(), .interop = interop});
  }
}

TEST_P(DdpOver, ParametersAndBuffersComeFromRankZero) {
  ranks(2, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4),
                              torch::nn::BatchNorm1d(4));
    const torch::NoGradGuard no_grad;
    for (auto& tensor : net->parameters()) tensor.fill_(rank + 1);
    for (auto& tensor : net->buffers()) tensor.fill_(rank + 5);
    auto model = DistributedDataParallel(net);
    for (auto& tensor : model->parameters()) {
      EXPECT_TRUE(torch::equal(tensor, torch::full_like(tensor, 1)));
    }
    for (auto& tensor : model->buffers()) {
      EXPECT_TRUE(torch::equal(tensor, torch::full_like(tensor, 5)));
    }
  });
}

TEST_P(DdpOver, ModelsThatDifferAreRefusedOnEveryRank) {
  const auto build = [](int variant) {
    torch::nn::Sequential net;
    net->push_back("a", torch::nn::Linear(3, 4));
    if (variant == 1) {
      net->push_back("c", torch::nn::Linear(4, 2));
    } else if (variant == 2) {
      net->push_back("b", torch::nn::Linear(4, 3));
    } else {
      net->push_back("b", torch::nn::Linear(4, 2));
    }
    if (variant == 3) net->to(torch::kDouble);
    if (variant == 4) net->parameters()[1].set_requires_grad(false);
    if (variant == 5) net->push_back("d", torch::nn::Linear(2, 2));
    return net;
  };
  const std::map<int, std::vector<std::string>> expected = {
      {1, {"\"b.weight\"", "\"c.weight\""}},
      {2, {"\"b.weight\" (Float [2, 4]", "(Float [3, 4]"}},
      {3, {"\"a.weight\" (Float", "(Double"}},
      {4, {"\"a.bias\" (Float [4], cpu, requires_grad", "[4], cpu)"}},
      {5, {"\"d.weight\"", "nothing more"}}};
  for (const auto& [variant, words] : expected) {
    std::atomic<int> refused{0};
    ranks(3, [&, variant = variant, words = words](int rank) {
      auto net = build(rank == 2 ? variant : 0);
      const auto text = message_of<MismatchError>(
          [&] { DistributedDataParallel model(net); });
      for (const auto& word : words) {
        EXPECT_NE(text.find(word), std::string::npos) << text;
      }
      EXPECT_NE(text.find("rank 2"), std::string::npos) << text;
      ++refused;
    });
    EXPECT_EQ(refused, 3);
  }
}

TEST_P(DdpOver, NoSyncAddsUpAndTheNextPassAveragesTheSum) {
  // 4 micro-batches per rank against one batch of all rows.
  const auto batch = formula({2 * 4 * kRows, 6});
  const auto expected = whole_batch(mlp(), batch);
  ranks(2, [&](int rank) {
    auto model = DistributedDataParallel(mlp());
    const auto micro = [&](int i) {
      return loss_of(model->forward(share(batch, rank * 4 + i, kRows))) / 4;
    };
    for (int round = 0; round < 2; ++round) {
      for (auto& parameter : model->parameters())
        parameter.mutable_grad().reset();
      {
        const auto outer = model->no_sync();
        micro(0).backward();
        {
          const auto inner = model->no_sync();
          micro(1).backward();
        }
        micro(2).backward();
        try {
          const auto scope = model->no_sync();
          throw std::runtime_error("a user's error");
        } catch (const std::runtime_error&) {
        }
      }
      micro(3).backward();
      expect_close(gradients(model->parameters()), expected);
      expect_same_on_all_ranks(gradients(model->parameters()));
    }
  });
}

TEST_P(DdpOver, TheForwardDecidesWhetherAPassIsAveraged) {
  ranks(2, [](int rank) {
    auto model = DistributedDataParallel(mlp());
    const auto input = formula({kRows, 6}, rank);
    const auto averaged = [&] {
      const auto own = gradients(model->parameters())[0];
      auto other = own.clone();
      broadcast(other);
      auto same = torch::tensor(torch::equal(own, other) ? 1 : 0);
      all_reduce(same, {.op = ReduceOp::MIN});
      for (auto& parameter : model->parameters())
        parameter.mutable_grad().reset();
      return same.item<int>() == 1;
    };
    auto loss = loss_of(model->forward(input));
    {
      const auto scope = model->no_sync();
      loss.backward();
    }
    EXPECT_TRUE(averaged());
    {
      const auto scope = model->no_sync();
      loss = loss_of(model->forward(input));
    }
    loss.backward();
    EXPECT_FALSE(averaged());

    // As in PyTorch: one forward outside no_sync is enough.
    loss = loss_of(model->forward(input));
    {
      const auto scope = model->no_sync();
      loss = loss + loss_of(model->forward(input));
    }
    loss.backward();
    EXPECT_TRUE(averaged());
    loss_of(model->module()->forward(input)).backward();
    EXPECT_FALSE(averaged());
    loss = loss_of(model->forward(input));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    EXPECT_TRUE(averaged());
  });
}

TEST_P(DdpOver, TwoForwardsAndOneOrTwoBackwards) {
  const auto first = formula({2 * kRows, 6}, 1);
  const auto second = formula({2 * kRows, 6}, 2);
  auto net = mlp();
  (loss_of(net->forward(first)) + loss_of(net->forward(second))).backward();
  const auto expected = gradients(net->parameters());
  ranks(2, [&](int rank) {
    auto model = DistributedDataParallel(mlp());
    for (const bool together : {true, false}) {
      for (auto& parameter : model->parameters())
        parameter.mutable_grad().reset();
      auto a = loss_of(model->forward(share(first, rank, kRows)));
      auto b = loss_of(model->forward(share(second, rank, kRows)));
      if (together) {
        (a + b).backward();
      } else {
        a.backward();
        b.backward();
      }
      expect_close(gradients(model->parameters()), expected);
    }
  });
}

struct Tied : torch::nn::Module {
  Tied() : first(register_module("first", torch::nn::Linear(6, 6))) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(formula(parameter.sizes(), 3));
    }
    tied = register_parameter("tied", first->weight);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::nn::functional::linear(torch::tanh(first(x)), tied);
  }
  torch::nn::Linear first;
  torch::Tensor tied;
};

/// Keeps nothing of `layer`'s forward, which backward runs again, with a
/// backward pass inside.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& x,
                               torch::nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return layer->forward(x);
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    const auto x = context->get_saved_variables()[0].detach();
    x.set_requires_grad(true);
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(
        context->saved_data["layer"].toInt());
    const torch::AutoGradMode grad_mode(true);
    layer->forward(x).backward(gradients[0]);
    return {x.grad(), torch::Tensor()};
  }
};

struct Checkpointed : torch::nn::Module {
  explicit Checkpointed(int64_t hidden)
      : net(register_module(
            "net",
            torch::nn::Sequential(torch::nn::Linear(6, hidden),
                                  torch::nn::Linear(hidden, hidden),
                                  torch::nn::Linear(hidden, 3)))) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(formula(parameter.sizes(), 2) * 0.1);
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto layer = [this](int i) {
      return net->ptr(i)->as<torch::nn::Linear>();
    };
    const auto inner = Checkpoint::apply(layer(0)->forward(x), layer(1));
    return layer(2)->forward(inner);
  }
  torch::nn::Sequential net;
};

TEST_P(DdpOver, ABackwardInsideBackward) {
  const auto batch = formula({2 * kRows, 6});
  for (const int64_t hidden : {5, 300}) {
    const auto expected =
        whole_batch(std::make_shared<Checkpointed>(hidden), batch);
    ranks(2, [&](int rank) {
      auto model =
          DistributedDataParallel(std::make_shared<Checkpointed>(hidden));
      for (int step = 0; step < 3; ++step) {
        for (auto& parameter : model->parameters())
          parameter.mutable_grad().reset();
        loss_of(model->forward(share(batch, rank, kRows))).backward();
        expect_close(gradients(model->parameters()), expected, 1e-5);
      }
    });
  }
}

TEST_P(DdpOver, TiedWeightsAndFrozenParameters) {
  const auto batch = formula({2 * kRows, 6});
  const auto expected = whole_batch(std::make_shared<Tied>(), batch);
  auto partly_frozen = mlp();
  partly_frozen->parameters()[1].set_requires_grad(false);
  loss_of(partly_frozen->forward(batch)).backward();
  ranks(2, [&](int rank) {
    auto tied = DistributedDataParallel(std::make_shared<Tied>());
    loss_of(tied->forward(share(batch, rank, kRows))).backward();
    expect_close(gradients(tied->parameters()), expected);

    auto net = mlp();
    net->parameters()[1].set_requires_grad(false);
    auto frozen = DistributedDataParallel(net);
    loss_of(frozen->forward(share(batch, rank, kRows))).backward();
    const auto parameters = frozen->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (i == 1) {
        EXPECT_FALSE(parameters[i].grad().defined());
      } else {
        EXPECT_TRUE(torch::allclose(parameters[i].grad(),
                                    partly_frozen->parameters()[i].grad(),
                                    0,
                                    1e-6));
      }
    }
  });
}

TEST_P(DdpOver, BuffersFollowRankZeroInTrainingOnly) {
  ranks(2, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(6, 4),
                              torch::nn::BatchNorm1d(4));
    auto model = DistributedDataParallel(net);
    const auto input = formula({kRows, 6}, rank);
    for (int step = 0; step < 3; ++step) {
      loss_of(model->forward(input)).backward();
    }
    // Two forwards before one backward: buffers are not saved for it.
    (loss_of(model->forward(input)) + loss_of(model->forward(input)))
        .backward();
    model->eval();
    EXPECT_FALSE(model->is_training());
    EXPECT_FALSE(net->is_training());
    // One rank alone: nothing may be communicated.
    if (rank == 0) (void)model->forward(input);
    model->train();
    {
      const torch::NoGradGuard no_grad;
      if (rank == 1) (void)model->forward(input);
    }
    barrier();
    (void)model->forward(input);
    auto counter = net->named_buffers()["1.num_batches_tracked"].clone();
    EXPECT_EQ(counter.item<int64_t>(), 6);
    // The running mean starts from rank 0's and takes this rank's batch.
    const auto own = net->named_buffers()["1.running_mean"].clone();
    auto others = own.clone();
    broadcast(others);
    EXPECT_EQ(rank == 0, torch::equal(own, others));
  });
}

TEST_P(DdpOver, BuffersOfAnyKindAreCopied) {
  ranks(2, [](int rank) {
    auto net = mlp();
    const auto buffer = [&](const char* name, const at::Tensor& tensor) {
      return net->register_buffer(name, tensor);
    };
    const std::vector<at::Tensor> buffers = {
        buffer("flag", torch::full({3}, rank == 0, torch::kBool)),
        buffer("counter", torch::tensor(int64_t{rank + 7})),
        buffer("turned", torch::full({2, 5}, rank + 0.5).t()),
        buffer("none", torch::empty({0})),
        buffer("half", torch::full({7}, rank + 2, torch::kHalf))};
    auto model = DistributedDataParallel(net);
    const std::vector<at::Tensor> expected = {
        torch::ones(3, torch::kBool),
        torch::tensor(int64_t{7}),
        torch::full({5, 2}, 0.5),
        torch::empty({0}),
        torch::full({7}, 2, torch::kHalf)};
    for (int step = 0; step < 2; ++step) {
      for (size_t i = 0; i < buffers.size(); ++i) {
        EXPECT_TRUE(torch::equal(buffers[i], expected[i])) << i;
        if (rank == 1) buffers[i].fill_(0);
      }
      (void)model->forward(formula({kRows, 6}));
    }
  });
}

TEST_P(DdpOver, BuffersStayWhereBroadcastIsOff) {
  ranks(2, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(6, 4),
                              torch::nn::BatchNorm1d(4));
    auto model = DistributedDataParallel(net, {.broadcast_buffers = false});
    if (rank == 1) net->named_buffers()["1.running_var"].fill_(7);
    net->eval();
    net->train();
    if (rank == 1) (void)model->forward(formula({kRows, 6}, rank));
    barrier();
    EXPECT_EQ(net->named_buffers()["1.num_batches_tracked"].item<int64_t>(),
              rank);
  });
}

TEST_P(DdpOver, GradientsOutliveZeroGradTheWrapperAndTheGroup) {
  std::mutex mutex;
  std::vector<at::Tensor> kept;
  const auto batch = formula({2 * kRows, 6});
  const auto expected = whole_batch(mlp(), batch);
  ranks(2, [&](int rank) {
    auto net = mlp();
    auto model = std::make_unique<DistributedDataParallel<decltype(net)>>(net);
    torch::optim::SGD optimizer(net->parameters(), 0.0);
    for (const bool to_none : {true, false, true}) {
      optimizer.zero_grad(to_none);
      loss_of(model->forward(share(batch, rank, kRows))).backward();
      const std::lock_guard lock(mutex);
      for (const auto& parameter : net->parameters()) {
        kept.push_back(parameter.grad());
      }
      expect_close(gradients(net->parameters()), expected);
      optimizer.step();
    }
    model.reset();
    loss_of(net->forward(batch)).backward();  // no hook is left
  });
  EXPECT_EQ(kept.size(), 2 * 3 * expected.size());
  for (const auto& tensor : kept) {
    EXPECT_TRUE(torch::isfinite(tensor).all().item<bool>());
  }
}

}  // namespace
}  // namespace lockstep
