#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ddp_support.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/memory/memory.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using test::formula;
using test::gradients;
using test::loss_of;
using test::share;
using testing::run_ranks;

constexpr int64_t kRows = 4;
// 301 x 301 floats are 354 KiB, and no whole number of cache lines.
constexpr int64_t kWidth = 301;
constexpr size_t kLargeBytes = kWidth * kWidth * sizeof(float);
constexpr int kLarge = 2;  // so many such parameters

/// The middle layers have large gradients, the others small ones.
torch::nn::Sequential wide() {
  torch::nn::Sequential net(torch::nn::Linear(6, kWidth),
                            torch::nn::Tanh(),
                            torch::nn::Linear(kWidth, kWidth),
                            torch::nn::Tanh(),
                            torch::nn::Linear(kWidth, kWidth),
                            torch::nn::Tanh(),
                            torch::nn::Linear(kWidth, 3));
  const torch::NoGradGuard no_grad;
  double seed = 0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(formula(parameter.sizes(), ++seed) * 0.1);
  }
  return net;
}

std::vector<at::Tensor> whole_batch(const at::Tensor& batch) {
  auto net = wide();
  loss_of(net->forward(batch)).backward();
  return gradients(net->parameters());
}

void expect_close(const std::vector<at::Tensor>& actual,
                  const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-5, 1e-6))
        << "parameter " << i;
  }
}

/// Ranks are threads of this process: its figures are all ranks' together.
size_t arena_in_use() {
  barrier();
  const size_t used = memory::statistics().arena_used_bytes;
  barrier();
  return used;
}

void on_shm(int n, const std::function<void(int)>& fn) {
  run_ranks(n, fn, {.backend = "shm", .timeout = std::chrono::seconds(20)});
}

TEST(DdpArena, StartsWithTheFirstWrapperAndEndsWithTheLastGradient) {
  EXPECT_EQ(memory::statistics().arena_bytes, 0u);
  const auto* stock = c10::GetCPUAllocator();
  std::mutex mutex;
  std::vector<at::Tensor> kept;
  const auto batch = formula({2 * kRows, 6});
  const auto expected = whole_batch(batch);
  on_shm(2, [&](int rank) {
    if (rank == 0) {
      EXPECT_EQ(c10::GetCPUAllocator(), stock);
    }
    barrier();
    auto model = DistributedDataParallel(wide());
    EXPECT_NE(c10::GetCPUAllocator(), stock);
    loss_of(model->forward(share(batch, rank, kRows))).backward();
    EXPECT_EQ(arena_in_use(), 2 * kLarge * kLargeBytes);
    const std::lock_guard lock(mutex);
    for (auto& parameter : model->parameters()) {
      kept.push_back(parameter.grad());
    }
  });
  // Wrapper and group are gone.
  EXPECT_EQ(memory::statistics().arena_used_bytes, 2 * kLarge * kLargeBytes);
  const auto half = static_cast<std::ptrdiff_t>(kept.size() / 2);
  expect_close({kept.begin(), kept.begin() + half}, expected);
  expect_close({kept.begin() + half, kept.end()}, expected);
  kept.clear();
  EXPECT_EQ(memory::statistics().arena_bytes, 0u);
}

TEST(DdpArena, EqualsTheCopyingFormAndOneProcess) {
  for (const int n : {2, 3}) {
    const auto batch = formula({n * kRows, 6});
    const auto expected = whole_batch(batch);
    on_shm(n, [&](int rank) {
      auto born = DistributedDataParallel(wide());
      auto copied = DistributedDataParallel(wide(), {.arena = false});
      for (int step = 0; step < 3; ++step) {
        for (auto* model : {&born, &copied}) {
          for (auto& p : model->parameters()) p.mutable_grad().reset();
          loss_of((*model)->forward(share(batch, rank, kRows))).backward();
          expect_close(gradients(model->parameters()), expected);
        }
        const auto a = gradients(born->parameters());
        const auto b = gradients(copied->parameters());
        for (size_t i = 0; i < a.size(); ++i) {
          EXPECT_TRUE(torch::equal(a[i], b[i])) << "parameter " << i;
        }
      }
    });
  }
}

TEST(DdpArena, AGradientThatSomeoneHoldsIsNeverOverwritten) {
  const auto first = formula({2 * kRows, 6}, 1);
  const auto second = formula({2 * kRows, 6}, 2);
  const auto expected_first = whole_batch(first);
  const auto expected_second = whole_batch(second);
  on_shm(2, [&](int rank) {
    auto model = DistributedDataParallel(wide());
    torch::optim::SGD optimizer(model->parameters(), 0.0);
    loss_of(model->forward(share(first, rank, kRows))).backward();
    std::vector<at::Tensor> held;
    for (auto& parameter : model->parameters()) {
      // On one rank only: the places differ, the gradient is copied there.
      if (rank == 0) held.push_back(parameter.grad());
    }
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      loss_of(model->forward(share(second, rank, kRows))).backward();
      expect_close(gradients(model->parameters()), expected_second);
    }
    if (rank == 0) expect_close(held, expected_first);
  });
}

TEST(DdpArena, NothingButGradientsLiesInIt) {
  const auto batch = formula({2 * kRows, 6});
  on_shm(2, [&](int rank) {
    auto model = DistributedDataParallel(wide());
    torch::optim::SGD optimizer(model->parameters(),
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 2; ++step) {
      loss_of(model->forward(share(batch, rank, kRows))).backward();
      optimizer.step();
      EXPECT_EQ(arena_in_use(), 2 * kLarge * kLargeBytes);
      const auto other = torch::empty({kWidth, kWidth});
      EXPECT_EQ(arena_in_use(), 2 * kLarge * kLargeBytes);
      optimizer.zero_grad();
      EXPECT_EQ(arena_in_use(), 0u);
    }
    // Kept and added to where zero_grad only zeroes.
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      loss_of(model->forward(share(batch, rank, kRows))).backward();
    }
    EXPECT_EQ(arena_in_use(), 2 * kLarge * kLargeBytes);
  });
}

TEST(DdpArena, AccumulationWithoutSync) {
  const auto batch = formula({4 * kRows, 6});
  const auto expected = whole_batch(batch);
  on_shm(2, [&](int rank) {
    auto model = DistributedDataParallel(wide());
    const auto micro = [&](int i) {
      return loss_of(model->forward(share(batch, 2 * rank + i, kRows))) / 2;
    };
    {
      const auto scope = model->no_sync();
      micro(0).backward();
    }
    micro(1).backward();
    expect_close(gradients(model->parameters()), expected);
  });
}

/// Throws in backward after the last layers' gradients are there.
struct Trap : torch::autograd::Function<Trap> {
  static torch::Tensor forward(torch::autograd::AutogradContext*,
                               const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext*, const torch::autograd::tensor_list&) {
    throw std::runtime_error("a user's error in backward");
  }
};

struct Trapped : torch::nn::Module {
  explicit Trapped() : net(register_module("net", wide())) {}
  torch::Tensor forward(torch::Tensor x, bool armed) {
    int i = 0;
    for (auto& layer : *net) {
      if (armed && ++i == 5) x = Trap::apply(x);
      x = layer.forward(x);
    }
    return x;
  }
  torch::nn::Sequential net;
};

TEST(DdpArena, AnExceptionInBackwardSwitchesItOff) {
  const auto batch = formula({2 * kRows, 6});
  const auto expected = whole_batch(batch);
  on_shm(2, [&](int rank) {
    auto model = DistributedDataParallel(std::make_shared<Trapped>());
    const auto input = share(batch, rank, kRows);
    for (int round = 0; round < 3; ++round) {
      auto loss = loss_of(model->forward(input, true));
      EXPECT_THROW(loss.backward(), std::runtime_error);
      loss.reset();
      EXPECT_EQ(arena_in_use(), 0u);
      const auto other = torch::empty({kWidth, kWidth});
      EXPECT_EQ(arena_in_use(), 0u);
      for (auto& p : model->parameters()) p.mutable_grad().reset();
      loss_of(model->forward(input, false)).backward();
      expect_close(gradients(model->parameters()), expected);
      for (auto& p : model->parameters()) p.mutable_grad().reset();
    }
  });
}

/// Calls `probe(number)` in backward, after the gradients of all later layers
/// are there and before those of all earlier ones.
thread_local std::function<void(int64_t)> probe;
struct Probe : torch::autograd::Function<Probe> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& x,
                               int64_t number) {
    context->saved_data["number"] = number;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    probe(context->saved_data["number"].toInt());
    return {gradients[0], torch::Tensor()};
  }
};

struct Probed : torch::nn::Module {
  explicit Probed() : net(register_module("net", wide())) {}
  torch::Tensor forward(torch::Tensor x) {
    int64_t i = 0;
    for (auto& layer : *net) {
      if (++i == 3 || i == 5) x = Probe::apply(x, i);
      x = layer.forward(x);
    }
    return x;
  }
  torch::nn::Sequential net;
};

TEST(DdpArena, GradientsAreReducedWhileBackwardRuns) {
  const auto batch = formula({2 * kRows, 6});
  const auto expected = whole_batch(batch);
  std::atomic<int> arrived{0};
  const auto wait_for_both = [&](int count) {
    const auto start = std::chrono::steady_clock::now();
    while (arrived < count && std::chrono::steady_clock::now() - start <
                                  std::chrono::seconds(20)) {
      std::this_thread::yield();
    }
  };
  on_shm(2, [&](int rank) {
    auto model = DistributedDataParallel(std::make_shared<Probed>());
    // At probe 5 both ranks have placed the gradient of the layer behind it; at
    // probe 3, with half of backward to come, it is averaged.
    probe = [&](int64_t number) {
      ++arrived;
      wait_for_both(number == 5 ? 2 : 4);
      if (number == 5) return;
      EXPECT_FALSE(model->parameters()[0].grad().defined());
      EXPECT_TRUE(torch::allclose(
          model->parameters()[4].grad(), expected[4], 1e-5, 1e-6));
    };
    loss_of(model->forward(share(batch, rank, kRows))).backward();
    expect_close(gradients(model->parameters()), expected);
  });
}

TEST(DdpArena, AFailedReductionRetiresTheSegment) {
  const auto batch = formula({2 * kRows, 6});
  const auto expected = whole_batch(batch);
  on_shm(2, [&](int rank) {
    auto model = DistributedDataParallel(wide());
    if (rank == 1) return;
    auto loss = loss_of(model->forward(share(batch, 0, kRows)));
    EXPECT_THROW(loss.backward(), PeerLost);
    loss.reset();
    EXPECT_EQ(memory::statistics().arena_used_bytes, 0u);
    for (auto& p : model->parameters()) p.mutable_grad().reset();
    {
      const auto scope = model->no_sync();
      loss_of(model->forward(batch)).backward();
    }
    EXPECT_EQ(memory::statistics().arena_used_bytes, 0u);
    expect_close(gradients(model->parameters()), expected);
  });
  // The next group makes a new one.
  on_shm(2, [&](int rank) {
    auto model = DistributedDataParallel(wide());
    loss_of(model->forward(share(batch, rank, kRows))).backward();
    EXPECT_EQ(arena_in_use(), 2 * kLarge * kLargeBytes);
    expect_close(gradients(model->parameters()), expected);
  });
}

}  // namespace
}  // namespace lockstep
