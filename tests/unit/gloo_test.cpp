#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <complex>
#include <cstdlib>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "comm/backends/gloo/connect.h"
#include "comm/backends/gloo/network.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using RedOp = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;

/// Runs `fn(rank, backend)` on n threads, each with a rank's backend.
void run_gloo(int n,
              const std::function<void(int, c10d::Backend&)>& fn,
              std::chrono::milliseconds timeout = 30s) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto backend = gloo::create({.store = store,
                                           .rank = rank,
                                           .world_size = n,
                                           .timeout = timeout,
                                           .liveness = nullptr});
        fn(rank, *backend);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

template <class E>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

void all_reduce(c10d::Backend& backend, const at::Tensor& tensor, RedOp op) {
  Tensors tensors = {tensor};
  backend.allreduce(tensors, {.reduceOp = op})->wait();
}

/// Small whole numbers, exact in every dtype: 1, 2 or 3.
at::Tensor input(int rank, int64_t numel, c10::ScalarType dtype) {
  return (torch::arange(numel) + rank).remainder(3).add(1).to(dtype);
}

at::Tensor reduced(int n, int64_t numel, c10::ScalarType dtype, RedOp op) {
  at::Tensor result = input(0, numel, at::kLong);
  for (int rank = 1; rank < n; ++rank) {
    const auto next = input(rank, numel, at::kLong);
    if (op == RedOp::SUM || op == RedOp::AVG) result = result + next;
    if (op == RedOp::PRODUCT) result = result * next;
    if (op == RedOp::MIN) result = at::minimum(result, next);
    if (op == RedOp::MAX) result = at::maximum(result, next);
  }
  if (op != RedOp::AVG) return result.to(dtype);
  return at::isFloatingType(dtype) ? result.to(dtype).div(n)
                                   : result.div(n, "trunc").to(dtype);
}

const std::vector<c10::ScalarType> kDtypes = {at::kByte,
                                              at::kChar,
                                              at::kShort,
                                              at::kInt,
                                              at::kLong,
                                              at::kHalf,
                                              at::kBFloat16,
                                              at::kFloat,
                                              at::kDouble};
const std::vector<RedOp> kOps = {
    RedOp::SUM, RedOp::AVG, RedOp::PRODUCT, RedOp::MIN, RedOp::MAX};
// None, fewer than ranks, odd, and more than fits the direct way.
const std::vector<int64_t> kNumels = {0, 1, 7, 70001};

class Gloo : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, Gloo, testing::Values(2, 3, 5));

TEST_P(Gloo, AllReduce) {
  const int n = GetParam();
  run_gloo(n, [n](int rank, c10d::Backend& backend) {
    for (const auto dtype : kDtypes) {
      for (const auto op : kOps) {
        for (const auto numel : kNumels) {
          const auto tensor = input(rank, numel, dtype);
          all_reduce(backend, tensor, op);
          EXPECT_TRUE(tensor.equal(reduced(n, numel, dtype, op)))
              << dtype << ' ' << int(op) << ' ' << numel;
        }
      }
    }
  });
}

TEST_P(Gloo, ReduceScatter) {
  const int n = GetParam();
  run_gloo(n, [n](int rank, c10d::Backend& backend) {
    for (const auto op : kOps) {
      for (const auto numel : kNumels) {
        const auto whole = input(rank, numel * n, at::kFloat);
        const auto expected = reduced(n, numel * n, at::kFloat, op)
                                  .slice(0, rank * numel, (rank + 1) * numel);
        auto output = torch::empty(numel);
        auto from = whole.clone();
        backend._reduce_scatter_base(output, from, {.reduceOp = op})->wait();
        EXPECT_TRUE(output.equal(expected));
        EXPECT_TRUE(from.equal(whole));

        Tensors outputs = {torch::empty(numel)};
        std::vector<Tensors> inputs(1);
        for (int r = 0; r < n; ++r) {
          inputs[0].push_back(
              whole.slice(0, r * numel, (r + 1) * numel).clone());
        }
        backend.reduce_scatter(outputs, inputs, {.reduceOp = op})->wait();
        EXPECT_TRUE(outputs[0].equal(expected));
      }
    }
  });
}

TEST_P(Gloo, BroadcastFromEachRoot) {
  const int n = GetParam();
  run_gloo(n, [n](int rank, c10d::Backend& backend) {
    for (int root = 0; root < n; ++root) {
      for (const auto dtype : {at::kFloat, at::kBool, at::kComplexDouble}) {
        for (const auto numel : kNumels) {
          Tensors tensors = {input(rank, numel, at::kLong).eq(1).to(dtype)};
          c10d::BroadcastOptions options;
          options.rootRank = root;
          backend.broadcast(tensors, options)->wait();
          EXPECT_TRUE(
              tensors[0].equal(input(root, numel, at::kLong).eq(1).to(dtype)));
        }
      }
    }
  });
}

TEST_P(Gloo, AllGather) {
  const int n = GetParam();
  run_gloo(n, [n](int rank, c10d::Backend& backend) {
    for (const auto dtype : {at::kShort, at::kBool, at::kComplexFloat}) {
      for (const auto numel : kNumels) {
        Tensors inputs = {input(rank, numel, dtype)};
        Tensors expected;
        std::vector<Tensors> outputs(1);
        for (int r = 0; r < n; ++r) {
          expected.push_back(input(r, numel, dtype));
          outputs[0].push_back(torch::empty({numel}, dtype));
        }
        backend.allgather(outputs, inputs)->wait();
        for (int r = 0; r < n; ++r) {
          EXPECT_TRUE(outputs[0][r].equal(expected[r]));
        }
        auto whole = torch::empty({numel * n}, dtype);
        backend._allgather_base(whole, inputs[0])->wait();
        EXPECT_TRUE(whole.equal(torch::cat(expected)));
      }
    }
  });
}

TEST(GlooBackend, AverageOfIntegersTruncatesTowardZero) {
  run_gloo(2, [](int rank, c10d::Backend& backend) {
    const auto tensor = torch::tensor({-7, 7, -1, 5}) * rank;
    all_reduce(backend, tensor, RedOp::AVG);
    EXPECT_TRUE(tensor.equal(torch::tensor({-3, 3, 0, 2})));
  });
}

TEST(GlooBackend, OperationsOverlapWithTheCaller) {
  run_gloo(3, [](int rank, c10d::Backend& backend) {
    std::vector<Tensors> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back({torch::full({1000 * i}, rank + i)});
      works.push_back(backend.allreduce(tensors[i]));
    }
    works.push_back(backend.barrier());
    for (auto& work : works) EXPECT_TRUE(work->wait());
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(works[i]->isCompleted());
      EXPECT_TRUE(works[i]->isSuccess());
      const auto future = works[i]->getFuture();
      future->wait();
      EXPECT_TRUE(future->value().toTensorVector()[0].is_same(tensors[i][0]));
      EXPECT_TRUE(tensors[i][0].equal(torch::full({1000 * i}, 3 * i + 3)));
    }
  });
}

TEST(GlooBackend, DifferentCallsAreRefusedOnEveryRank) {
  struct Case {
    std::function<void(int, c10d::Backend&)> call;
    std::string text;
  };
  const auto reduce = [](at::Tensor tensor, RedOp op) {
    return [=](c10d::Backend& b) { all_reduce(b, tensor, op); };
  };
  const std::vector<Case> cases = {
      {[&](int rank, c10d::Backend& b) {
         reduce(torch::ones(rank == 2 ? 5 : 4), RedOp::SUM)(b);
       },
       "rank 0 called all_reduce of Float [4] with SUM, rank 2 called "
       "all_reduce of Float [5] with SUM"},
      {[&](int rank, c10d::Backend& b) {
         reduce(torch::ones(1, rank == 1 ? at::kInt : at::kHalf),
                RedOp::MAX)(b);
       },
       "rank 0 called all_reduce of Half [1] with MAX, rank 1 called "
       "all_reduce of Int [1] with MAX"},
      {[&](int rank, c10d::Backend& b) {
         reduce(torch::ones(1), rank == 1 ? RedOp::MIN : RedOp::AVG)(b);
       },
       "rank 0 called all_reduce of Float [1] with AVG, rank 1 called "
       "all_reduce of Float [1] with MIN"},
      {[&](int rank, c10d::Backend& b) {
         Tensors tensors = {torch::ones(1)};
         c10d::BroadcastOptions options;
         options.rootRank = rank == 2 ? 1 : 0;
         b.broadcast(tensors, options)->wait();
       },
       "rank 0 called broadcast of Float [1] from rank 0, rank 2 called "
       "broadcast of Float [1] from rank 1"},
      {[&](int rank, c10d::Backend& b) {
         if (rank == 0) {
           b.barrier()->wait();
         } else {
           reduce(torch::ones(1), RedOp::SUM)(b);
         }
       },
       "rank 0 called barrier, rank 1 called all_reduce of Float [1] with "
       "SUM"},
  };
  for (const auto& c : cases) {
    run_gloo(3, [&](int rank, c10d::Backend& backend) {
      const auto text = text_of<MismatchError>([&] { c.call(rank, backend); });
      EXPECT_NE(text.find(c.text), std::string::npos) << text;
      EXPECT_NE(text.find("[gloo rank " + std::to_string(rank) + "/3] "),
                std::string::npos)
          << text;
      EXPECT_NE(text.find("#1 on group \"world\""), std::string::npos) << text;
      EXPECT_NE(text_of<BackendError>([&] {
                  backend.barrier()->wait();
                }).find("cannot be used again"),
                std::string::npos);
    });
  }
}

TEST(GlooBackend, ARankThatDoesNotCallIsNamedAtTheDeadline) {
  run_gloo(3, [](int rank, c10d::Backend& backend) {
    all_reduce(backend, torch::ones(1), RedOp::SUM);
    if (rank == 2) {
      std::this_thread::sleep_for(800ms);
      return;
    }
    backend.setTimeout(300ms);
    try {
      all_reduce(backend, torch::ones(1), RedOp::SUM);
      ADD_FAILURE() << "no error";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.context().peers, std::vector<int>{2}) << error.what();
      EXPECT_EQ(error.context().sequence, 2u);
    }
  });
}

TEST(GlooBackend, WaitTakesATimeout) {
  std::promise<void> timed_out;
  run_gloo(2, [&](int rank, c10d::Backend& backend) {
    if (rank == 1) timed_out.get_future().wait_for(20s);
    Tensors tensors = {torch::ones(1)};
    const auto work = backend.allreduce(tensors);
    if (rank == 0) {
      EXPECT_THROW(work->wait(10ms), TimeoutError);
      timed_out.set_value();
    }
    work->wait();
    EXPECT_EQ(tensors[0].item<float>(), 2);
  });
}

TEST(GlooBackend, AbortEndsWhatIsPending) {
  run_gloo(2, [](int rank, c10d::Backend& backend) {
    if (rank == 1) {
      std::this_thread::sleep_for(500ms);
      return;
    }
    Tensors small = {torch::ones(1)};
    Tensors large = {torch::ones(1 << 20)};
    const auto first = backend.allreduce(small);
    const auto second = backend.allreduce(large);
    std::this_thread::sleep_for(50ms);
    backend.abort();
    EXPECT_THROW(first->wait(), BackendError);
    EXPECT_THROW(second->wait(), BackendError);
  });
}

TEST(GlooBackend, WhatWasSentArrivesThoughTheSenderLeaves) {
  for (int round = 0; round < 5; ++round) {
    run_gloo(3, [](int rank, c10d::Backend& backend) {
      const auto tensor = torch::full({1 << 20}, rank);
      all_reduce(backend, tensor, RedOp::SUM);
      EXPECT_TRUE(tensor.equal(torch::full({1 << 20}, 3)));
      backend.shutdown();
      EXPECT_THROW(backend.barrier(), InvalidArgument);
    });
  }
}

TEST(GlooBackend, WithoutChecks) {
  ::setenv("LOCKSTEP_CHECK", "0", 1);
  run_gloo(3, [](int rank, c10d::Backend& backend) {
    const auto tensor = torch::full({100}, rank);
    all_reduce(backend, tensor, RedOp::SUM);
    EXPECT_TRUE(tensor.equal(torch::full({100}, 3)));
    backend.barrier()->wait();
  });
  ::unsetenv("LOCKSTEP_CHECK");
}

TEST(GlooBackend, WrongArguments) {
  run_gloo(2, [](int /*rank*/, c10d::Backend& backend) {
    Tensors none;
    EXPECT_THROW(backend.allreduce(none), InvalidArgument);
    Tensors strided = {torch::ones({4, 4}).t()};
    EXPECT_THROW(backend.allreduce(strided), InvalidArgument);
    Tensors complex = {torch::ones(1, at::kComplexFloat)};
    EXPECT_THROW(backend.allreduce(complex), Unsupported);
    Tensors one = {torch::ones(3)};
    EXPECT_THROW(backend.allreduce(one, {.reduceOp = c10d::ReduceOp::BAND}),
                 Unsupported);
    std::vector<Tensors> too_few = {{torch::ones(3)}};
    EXPECT_THROW(backend.allgather(too_few, one), InvalidArgument);
    auto whole = torch::ones(5);
    EXPECT_THROW(backend._allgather_base(whole, one[0]), InvalidArgument);
  });
}

TEST(GlooNetwork, OneHostMeansLoopback) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const auto one_host :
       {std::optional<bool>(true), std::optional<bool>()}) {
    const auto endpoint = gloo::choose_endpoint(store, one_host);
    EXPECT_TRUE(endpoint.interfaces.empty());
    EXPECT_EQ(endpoint.address, "127.0.0.1");
  }
}

TEST(GlooNetwork, TheVariableNamesInterfacesOrAnAddress) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ::setenv("GLOO_SOCKET_IFNAME", "lo", 1);
  EXPECT_EQ(gloo::choose_endpoint(store, true).interfaces,
            std::vector<std::string>{"lo"});
  run_gloo(2, [](int, c10d::Backend& backend) { backend.barrier()->wait(); });
  ::setenv("GLOO_SOCKET_IFNAME", "127.0.0.1", 1);
  EXPECT_EQ(gloo::choose_endpoint(store, false).address, "127.0.0.1");
  ::setenv("GLOO_SOCKET_IFNAME", "eth99", 1);
  const auto text = text_of<InvalidArgument>(
      [&] { (void)gloo::choose_endpoint(store, true); });
  EXPECT_NE(text.find("\"eth99\" is no interface of this host; present are"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("lo=127.0.0.1"), std::string::npos) << text;
  ::unsetenv("GLOO_SOCKET_IFNAME");
}

TEST(GlooNetwork, LoopbackIsRefusedForSeveralHosts) {
  const auto store = c10::make_intrusive<c10d::TCPStore>(
      "127.0.0.1", c10d::TCPStoreOptions{.port = 0, .isServer = true});
  EXPECT_EQ(gloo::choose_endpoint(store, std::nullopt).address, "127.0.0.1");
  EXPECT_NE(text_of<InvalidArgument>([&] {
              (void)gloo::choose_endpoint(store, false);
            }).find("MASTER_ADDR"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep::comm
