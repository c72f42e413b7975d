#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <future>
#include <thread>

#include "comm/backends/shm/layout.h"
#include "comm/backends/shm/shm_backend.h"
#include "lockstep/core/error.h"
#include "support/fake_liveness.h"
#include "support/threads.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;
using Op = c10d::ReduceOp;

/// What a rank of a test sees.
struct Rank {
  int rank;
  int size;
  c10d::Backend& backend;
  test::FakeHost& host;
};

void on_ranks(int n,
              const std::function<void(const Rank&)>& fn,
              std::chrono::milliseconds timeout = 60s) {
  const auto host = test::FakeHost::make(n);
  test::on_threads(n, [&](int rank) {
    at::set_num_threads(1);
    const auto backend = create({.rank = rank,
                                 .world_size = n,
                                 .timeout = timeout,
                                 .liveness = host->liveness(rank)});
    fn({rank, n, *backend, *host});
  });
}

template <class Options>
Options sync(Options options = {}) {
  options.asyncOp = false;
  return options;
}

c10d::AllreduceOptions reduce_with(Op::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
  return options;
}

/// Rank r's element i: small whole numbers, exact in every type. Their period
/// divides no cache line, so that one from a wrong place shows.
at::Tensor values(int rank, int64_t numel, at::ScalarType dtype) {
  return ((torch::arange(numel, torch::kLong) * 7 + rank * 3) % 5 + 1)
      .to(dtype);
}

/// The reduction of all ranks' `values` by the formula.
at::Tensor reduced(Op::RedOpType op,
                   int size,
                   int64_t numel,
                   at::ScalarType dtype) {
  auto result = values(0, numel, torch::kLong);
  for (int r = 1; r < size; ++r) {
    const auto next = values(r, numel, torch::kLong);
    switch (op) {
      case Op::PRODUCT:
        result = result * next;
        break;
      case Op::MIN:
        result = torch::minimum(result, next);
        break;
      case Op::MAX:
        result = torch::maximum(result, next);
        break;
      default:
        result = result + next;
    }
  }
  if (op != Op::AVG) return result.to(dtype);
  if (c10::isIntegralType(dtype, false)) {
    return torch::div(result, size, "trunc").to(dtype);
  }
  return (result.to(torch::kDouble) / size)
      .to(dtype == torch::kDouble ? torch::kDouble : torch::kFloat)
      .to(dtype);
}

constexpr at::ScalarType kDtypes[] = {torch::kFloat,
                                      torch::kDouble,
                                      torch::kHalf,
                                      torch::kBFloat16,
                                      torch::kChar,
                                      torch::kShort,
                                      torch::kInt,
                                      torch::kLong,
                                      torch::kByte};
constexpr Op::RedOpType kOps[] = {
    Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX};
constexpr int64_t kSizes[] = {0, 1, 3, 257, 16'385, 70'001};

class ShmBackend : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, ShmBackend, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(ShmBackend, AllReduceGivesTheFormula) {
  std::vector<int64_t> sizes(std::begin(kSizes), std::end(kSizes));
  // Two ranks have an algorithm of their own for chunks in the middle.
  if (GetParam() == 2) sizes.insert(sizes.end(), {262'144, 300'007});
  on_ranks(GetParam(), [&](const Rank& r) {
    for (const auto dtype : kDtypes) {
      for (const auto op : kOps) {
        for (const int64_t numel : sizes) {
          // Products of eight ranks do not fit the small types.
          if (op == Op::PRODUCT && c10::elementSize(dtype) < 4 && r.size > 3) {
            continue;
          }
          Tensors tensors = {values(r.rank, numel, dtype)};
          r.backend.allreduce(tensors, reduce_with(op));
          ASSERT_TRUE(
              torch::equal(tensors[0], reduced(op, r.size, numel, dtype)))
              << c10::toString(dtype) << " op " << int{op} << " numel "
              << numel;
        }
      }
    }
  });
}

TEST_P(ShmBackend, LargeMessagesTakeManyChunks) {
  on_ranks(GetParam(), [](const Rank& r) {
    const int64_t numel = 300'003;
    Tensors tensors = {values(r.rank, numel, torch::kFloat)};
    r.backend.allreduce(tensors, reduce_with(Op::SUM));
    EXPECT_TRUE(torch::equal(tensors[0],
                             reduced(Op::SUM, r.size, numel, torch::kFloat)));
    tensors = {values(r.rank, numel, torch::kChar)};
    r.backend.allreduce(tensors, reduce_with(Op::MAX));
    EXPECT_TRUE(torch::equal(tensors[0],
                             reduced(Op::MAX, r.size, numel, torch::kChar)));
  });
}

TEST_P(ShmBackend, BroadcastOverwritesWithTheRoots) {
  on_ranks(GetParam(), [](const Rank& r) {
    for (const auto dtype :
         {torch::kFloat, torch::kBool, torch::kComplexDouble, torch::kByte}) {
      for (const int64_t numel : {0, 1, 257, 70'001, 60'007}) {
        for (int root = 0; root < r.size; root += 2) {
          Tensors tensors = {values(r.rank, numel, dtype)};
          auto options = sync<c10d::BroadcastOptions>();
          options.rootRank = root;
          r.backend.broadcast(tensors, options);
          ASSERT_TRUE(torch::equal(tensors[0], values(root, numel, dtype)));
        }
      }
    }
  });
}

TEST_P(ShmBackend, AllGatherPutsEveryRanksInput) {
  on_ranks(GetParam(), [](const Rank& r) {
    for (const auto dtype :
         {torch::kFloat, torch::kBool, torch::kComplexFloat, torch::kHalf}) {
      for (const int64_t numel : {0, 1, 257, 70'001, 60'007}) {
        Tensors inputs = {values(r.rank, numel, dtype)};
        std::vector<Tensors> outputs(1);
        for (int i = 0; i < r.size; ++i) {
          outputs[0].push_back(torch::zeros({numel}).to(dtype));
        }
        r.backend.allgather(outputs, inputs, sync<c10d::AllgatherOptions>());
        auto into = torch::zeros({numel * r.size}).to(dtype);
        r.backend._allgather_base(
            into, inputs[0], sync<c10d::AllgatherOptions>());
        for (int i = 0; i < r.size; ++i) {
          const auto want = values(i, numel, dtype);
          ASSERT_TRUE(torch::equal(outputs[0][static_cast<size_t>(i)], want));
          ASSERT_TRUE(torch::equal(into.narrow(0, i * numel, numel), want));
        }
      }
    }
  });
}

TEST_P(ShmBackend, ReduceScatterGivesEachRankItsPart) {
  on_ranks(GetParam(), [](const Rank& r) {
    auto options = sync<c10d::ReduceScatterOptions>();
    for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kInt}) {
      for (const auto op : {Op::SUM, Op::AVG, Op::MIN}) {
        for (const int64_t numel : {0, 1, 257, 16'385, 70'001}) {
          options.reduceOp = op;
          auto whole = values(r.rank, numel * r.size, dtype);
          const auto want = reduced(op, r.size, numel * r.size, dtype)
                                .narrow(0, r.rank * numel, numel);
          auto output = torch::zeros({numel}).to(dtype);
          r.backend._reduce_scatter_base(output, whole, options);
          ASSERT_TRUE(torch::equal(output, want)) << numel;
          std::vector<Tensors> inputs(1);
          for (int i = 0; i < r.size; ++i) {
            inputs[0].push_back(whole.narrow(0, i * numel, numel).clone());
          }
          Tensors outputs = {torch::zeros({numel}).to(dtype)};
          r.backend.reduce_scatter(outputs, inputs, options);
          ASSERT_TRUE(torch::equal(outputs[0], want));
        }
      }
    }
  });
}

TEST_P(ShmBackend, CoalescedCallsTreatEachTensor) {
  on_ranks(GetParam(), [](const Rank& r) {
    Tensors tensors = {values(r.rank, 5, torch::kFloat),
                       values(r.rank, 100'003, torch::kDouble)};
    c10d::AllreduceCoalescedOptions options;
    options.asyncOp = false;
    r.backend.allreduce_coalesced(tensors, options);
    EXPECT_TRUE(
        torch::equal(tensors[0], reduced(Op::SUM, r.size, 5, torch::kFloat)));
    EXPECT_TRUE(torch::equal(
        tensors[1], reduced(Op::SUM, r.size, 100'003, torch::kDouble)));

    Tensors inputs = {torch::full({2}, r.rank), torch::full({3}, -r.rank)};
    Tensors outputs = {torch::empty({2 * r.size}, torch::kLong),
                       torch::empty({3 * r.size}, torch::kLong)};
    r.backend.allgather_into_tensor_coalesced(
        outputs, inputs, sync<c10d::AllgatherOptions>());
    const auto ranks = torch::arange(r.size, torch::kLong);
    EXPECT_TRUE(torch::equal(outputs[0], ranks.repeat_interleave(2)));
    EXPECT_TRUE(torch::equal(outputs[1], -ranks.repeat_interleave(3)));

    Tensors parts = {torch::empty({2}, torch::kLong),
                     torch::empty({3}, torch::kLong)};
    r.backend.reduce_scatter_tensor_coalesced(
        parts, outputs, sync<c10d::ReduceScatterOptions>());
    EXPECT_TRUE(torch::equal(parts[0], torch::full({2}, r.rank * r.size)));
    EXPECT_TRUE(torch::equal(parts[1], torch::full({3}, -r.rank * r.size)));
  });
}

TEST_P(ShmBackend, InPlaceGatherAndScatterWork) {
  on_ranks(GetParam(), [](const Rank& r) {
    for (const int64_t numel : {7, 200'003}) {
      auto whole = torch::zeros({r.size * numel});
      auto own = whole.narrow(0, r.rank * numel, numel);
      own.copy_(values(r.rank, numel, torch::kFloat));
      r.backend._allgather_base(whole, own, sync<c10d::AllgatherOptions>());
      for (int i = 0; i < r.size; ++i) {
        EXPECT_TRUE(torch::equal(whole.narrow(0, i * numel, numel),
                                 values(i, numel, torch::kFloat)));
      }
      const auto want = own * r.size;
      r.backend._reduce_scatter_base(
          own, whole, sync<c10d::ReduceScatterOptions>());
      EXPECT_TRUE(torch::equal(own, want));
    }
  });
}

TEST_P(ShmBackend, BarrierLetsNobodyThroughEarly) {
  std::atomic<int> arrived{0};
  on_ranks(GetParam(), [&](const Rank& r) {
    for (int round = 1; round <= 200; ++round) {
      ++arrived;
      r.backend.barrier(sync<c10d::BarrierOptions>());
      ASSERT_GE(arrived.load(), round * r.size);
    }
  });
}

TEST(ShmBackend, SixtyFourRanksOnFewCores) {
  EXPECT_LT(Layout(64).bytes(), 64u << 20);
  on_ranks(64, [](const Rank& r) {
    for (const int64_t numel : {3, 150'001}) {
      Tensors tensors = {torch::full({numel}, static_cast<float>(r.rank))};
      r.backend.allreduce(tensors, reduce_with(Op::SUM));
      ASSERT_TRUE(torch::equal(tensors[0], torch::full({numel}, 2016.0F)));
    }
  });
}

TEST(ShmBackend, ReductionIsInRankOrderAndEqualOnAllRanks) {
  // (1e8 + 1) - 1e8 is 0 in float, in any other order 1.
  for (const int64_t numel : {5, 200'003}) {
    on_ranks(3, [&](const Rank& r) {
      const float mine[] = {1e8F, 1.0F, -1e8F};
      Tensors tensors = {torch::full({numel}, mine[r.rank])};
      r.backend.allreduce(tensors, reduce_with(Op::SUM));
      EXPECT_TRUE(torch::equal(tensors[0], torch::zeros({numel})));
    });
  }
}

TEST(ShmBackend, OfTwoZerosTheFirstRanksIsTaken) {
  on_ranks(2, [](const Rank& r) {
    for (const auto op : {Op::MIN, Op::MAX}) {
      // A view, so that nothing starts at a cache line.
      auto all = torch::full({300'001}, r.rank == 0 ? 0.0 : -0.0);
      Tensors tensors = {all.narrow(0, 1, 300'000)};
      r.backend.allreduce(tensors, reduce_with(op));
      EXPECT_FALSE(tensors[0].signbit().any().item<bool>());
      EXPECT_EQ(all[0].signbit().item<bool>(), r.rank == 1);
    }
  });
}

TEST(ShmBackend, BoolHasMinAndMax) {
  on_ranks(2, [](const Rank& r) {
    const auto own = torch::tensor({false, r.rank == 1, r.rank == 0, true});
    Tensors tensors = {own.clone()};
    r.backend.allreduce(tensors, reduce_with(Op::MIN));
    EXPECT_TRUE(
        torch::equal(tensors[0], torch::tensor({false, false, false, true})));
    tensors = {own.clone()};
    r.backend.allreduce(tensors, reduce_with(Op::MAX));
    EXPECT_TRUE(
        torch::equal(tensors[0], torch::tensor({false, true, true, true})));
    EXPECT_THROW(r.backend.allreduce(tensors, reduce_with(Op::SUM)),
                 Unsupported);
  });
}

TEST(ShmBackend, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  on_ranks(2, [](const Rank& r) {
    auto& b = r.backend;
    Tensors complex = {torch::zeros({2}, torch::kComplexFloat)};
    EXPECT_THROW(b.allreduce(complex, reduce_with(Op::SUM)), Unsupported);
    Tensors integers = {torch::zeros({2}, torch::kInt)};
    EXPECT_THROW(b.allreduce(integers, reduce_with(Op::BAND)), Unsupported);
    Tensors transposed = {torch::zeros({2, 3}).t()};
    EXPECT_THROW(b.allreduce(transposed, reduce_with(Op::SUM)),
                 InvalidArgument);
    Tensors undefined = {at::Tensor()};
    EXPECT_THROW(b.allreduce(undefined, reduce_with(Op::SUM)), InvalidArgument);
    Tensors meta = {torch::zeros({2}, torch::kMeta)};
    EXPECT_THROW(b.allreduce(meta, reduce_with(Op::SUM)), InvalidArgument);
    Tensors good = {torch::zeros({2})};
    auto root = sync<c10d::BroadcastOptions>();
    root.rootRank = 2;
    EXPECT_THROW(b.broadcast(good, root), InvalidArgument);
    auto small = torch::zeros({3});
    EXPECT_THROW(
        b._allgather_base(small, good[0], sync<c10d::AllgatherOptions>()),
        InvalidArgument);
    std::vector<Tensors> lists = {{torch::zeros({2})}};
    EXPECT_THROW(b.allgather(lists, good, sync<c10d::AllgatherOptions>()),
                 InvalidArgument);
    EXPECT_THROW(
        b.reduce_scatter(good, lists, sync<c10d::ReduceScatterOptions>()),
        InvalidArgument);
    // The group still works.
    r.backend.allreduce(good, reduce_with(Op::SUM));
  });
}

/// Runs `call` on every rank and expects the same MismatchError everywhere,
/// with both texts in it; the group is unusable afterwards.
void expect_mismatch(int ranks,
                     const std::function<void(const Rank&)>& call,
                     const std::string& first,
                     const std::string& second) {
  on_ranks(ranks, [&](const Rank& r) {
    try {
      call(r);
      ADD_FAILURE() << "no error on rank " << r.rank;
    } catch (const MismatchError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(first), std::string::npos) << text;
      EXPECT_NE(text.find(second), std::string::npos) << text;
    }
    try {
      r.backend.barrier(sync<c10d::BarrierOptions>());
      ADD_FAILURE() << "usable after a failure";
    } catch (const BackendError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("cannot be used again"), std::string::npos);
      EXPECT_NE(text.find(second), std::string::npos) << text;
    }
  });
}

TEST(ShmBackend, MismatchedCallsEndOnEveryRank) {
  expect_mismatch(
      2,
      [](const Rank& r) {
        Tensors tensors = {torch::zeros({r.rank == 0 ? 4 : 6})};
        r.backend.allreduce(tensors, reduce_with(Op::SUM));
      },
      "rank 0 called all_reduce of Float [4] with SUM",
      "rank 1 called all_reduce of Float [6] with SUM");
  expect_mismatch(
      3,
      [](const Rank& r) {
        Tensors tensors = {torch::zeros(
            {200'000}, r.rank == 2 ? torch::kDouble : torch::kFloat)};
        r.backend.allreduce(tensors, reduce_with(Op::SUM));
      },
      "rank 0 called all_reduce of Float [200000] with SUM",
      "rank 2 called all_reduce of Double [200000] with SUM");
  expect_mismatch(
      2,
      [](const Rank& r) {
        Tensors tensors = {torch::zeros({4})};
        if (r.rank == 0) {
          r.backend.allreduce(tensors, reduce_with(Op::MAX));
        } else {
          r.backend.broadcast(tensors, sync<c10d::BroadcastOptions>());
        }
      },
      "rank 0 called all_reduce of Float [4] with MAX",
      "rank 1 called broadcast of Float [4] from rank 0");
  expect_mismatch(
      2,
      [](const Rank& r) {
        Tensors tensors = {torch::zeros({4})};
        auto options = sync<c10d::BroadcastOptions>();
        options.rootRank = r.rank;
        r.backend.broadcast(tensors, options);
      },
      "broadcast of Float [4] from rank 0",
      "broadcast of Float [4] from rank 1");
  expect_mismatch(
      2,
      [](const Rank& r) {
        Tensors tensors = {r.rank == 0 ? torch::zeros({2, 3})
                                       : torch::zeros({3, 2})};
        r.backend.allreduce(tensors,
                            reduce_with(r.rank == 0 ? Op::SUM : Op::SUM));
      },
      "all_reduce of Float [2, 3] with SUM",
      "all_reduce of Float [3, 2] with SUM");
  expect_mismatch(
      2,
      [](const Rank& r) {
        Tensors tensors = {torch::zeros({})};
        r.backend.allreduce(tensors,
                            reduce_with(r.rank == 0 ? Op::SUM : Op::PRODUCT));
      },
      "all_reduce of Float [] with SUM",
      "all_reduce of Float [] with PRODUCT");
}

TEST(ShmBackend, ARankThatIsOneCallAheadIsFound) {
  expect_mismatch(
      2,
      [](const Rank& r) {
        Tensors tensors = {torch::zeros({4})};
        if (r.rank == 0) r.backend.barrier(sync<c10d::BarrierOptions>());
        r.backend.allreduce(tensors, reduce_with(Op::SUM));
      },
      "rank 0 called barrier",
      "rank 1 called all_reduce of Float [4] with SUM");
}

TEST(ShmBackend, AMissingRankIsNamedAtTheDeadline) {
  on_ranks(3, [](const Rank& r) {
    Tensors tensors = {torch::ones({8})};
    r.backend.allreduce(tensors, reduce_with(Op::SUM));
    if (r.rank == 1) {
      std::this_thread::sleep_for(600ms);
      return;
    }
    auto options = reduce_with(Op::SUM);
    options.timeout = 300ms;
    const auto start = std::chrono::steady_clock::now();
    try {
      r.backend.allreduce(tensors, options);
      ADD_FAILURE() << "no error";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.context().peers, std::vector<int>{1});
      EXPECT_EQ(error.context().sequence, 2u);
      EXPECT_EQ(error.context().operation, "all_reduce");
    }
    EXPECT_GE(std::chrono::steady_clock::now() - start, 300ms);
  });
}

TEST(ShmBackend, SetTimeoutIsTheDefault) {
  on_ranks(2, [](const Rank& r) {
    if (r.rank == 1) return std::this_thread::sleep_for(300ms);
    r.backend.setTimeout(100ms);
    EXPECT_EQ(r.backend.getBackendOptions()->timeout, 100ms);
    EXPECT_THROW(r.backend.barrier(sync<c10d::BarrierOptions>()), TimeoutError);
  });
}

TEST(ShmBackend, ADeathEndsCallsUnderWayAndLaterOnes) {
  on_ranks(3, [](const Rank& r) {
    if (r.rank == 1) {
      std::this_thread::sleep_for(100ms);
      r.host.kill(1);
      return;
    }
    Tensors tensors = {torch::ones({100'000})};
    try {
      r.backend.allreduce(tensors, reduce_with(Op::SUM));
      ADD_FAILURE() << "no error";
    } catch (const PeerLost& error) {
      EXPECT_EQ(error.context().peers, std::vector<int>{1});
    }
    try {
      r.backend.allreduce(tensors, reduce_with(Op::SUM));
      ADD_FAILURE() << "usable after a failure";
    } catch (const BackendError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 died"),
                std::string::npos);
    }
  });
}

TEST(ShmBackend, AsynchronousOperationsRunInOrder) {
  on_ranks(3, [](const Rank& r) {
    Tensors a = {torch::full({200'003}, 1.0F)};
    Tensors b = {torch::full({5}, static_cast<float>(r.rank))};
    const auto first = r.backend.allreduce(a, {});
    const auto second = r.backend.allreduce(b, {});
    // A synchronous one queues behind them.
    Tensors c = {torch::full({7}, 2.0F)};
    r.backend.allreduce(c, reduce_with(Op::SUM));
    EXPECT_TRUE(first->isCompleted());
    EXPECT_TRUE(second->isCompleted());
    EXPECT_TRUE(first->wait());
    EXPECT_TRUE(second->isSuccess());
    EXPECT_TRUE(torch::equal(a[0], torch::full({200'003}, 3.0F)));
    EXPECT_TRUE(torch::equal(b[0], torch::full({5}, 3.0F)));
    EXPECT_TRUE(torch::equal(c[0], torch::full({7}, 6.0F)));
    EXPECT_EQ(first->result()[0].data_ptr(), a[0].data_ptr());
  });
}

TEST(ShmBackend, FuturesCarryTheOutputs) {
  on_ranks(2, [](const Rank& r) {
    for (const bool async : {false, true}) {
      Tensors tensors = {torch::ones({4})};
      auto options = reduce_with(Op::SUM);
      options.asyncOp = async;
      const auto work = r.backend.allreduce(tensors, options);
      const auto future = work->getFuture();
      future->wait();
      const auto outputs = future->value().toTensorVector();
      ASSERT_EQ(outputs.size(), 1u);
      EXPECT_TRUE(torch::equal(outputs[0], torch::full({4}, 2.0F)));
      EXPECT_TRUE(work->wait());
    }
  });
}

TEST(ShmBackend, TensorsLiveUntilAnAsynchronousOperationEnds) {
  on_ranks(2, [](const Rank& r) {
    c10::intrusive_ptr<c10d::Work> work;
    {
      Tensors inputs = {torch::full({300'000}, static_cast<float>(r.rank))};
      std::vector<Tensors> outputs = {
          {torch::zeros({300'000}), torch::zeros({300'000})}};
      work = r.backend.allgather(outputs, inputs, {});
    }
    work->wait();
    EXPECT_TRUE(torch::equal(work->result()[1], torch::ones({300'000})));
  });
}

TEST(ShmBackend, WaitHasATimeoutOfItsOwn) {
  on_ranks(2, [](const Rank& r) {
    if (r.rank == 1) std::this_thread::sleep_for(300ms);
    Tensors tensors = {torch::ones({4})};
    const auto work = r.backend.allreduce(tensors, {});
    if (r.rank == 0) {
      EXPECT_THROW(work->wait(20ms), TimeoutError);
      EXPECT_FALSE(work->isCompleted());
    }
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(torch::equal(tensors[0], torch::full({4}, 2.0F)));
  });
}

TEST(ShmBackend, AnAsynchronousFailureSurfacesInWaitAndInTheFuture) {
  std::promise<void> queued;
  on_ranks(2, [&](const Rank& r) {
    if (r.rank == 1) queued.get_future().wait();
    Tensors tensors = {torch::zeros({r.rank + 1})};
    const auto work = r.backend.allreduce(tensors, {});
    if (r.rank == 0) {
      const auto queued_too = r.backend.barrier({});
      queued.set_value();
      EXPECT_THROW(queued_too->wait(), MismatchError);
    }
    EXPECT_THROW(work->wait(), MismatchError);
    EXPECT_FALSE(work->isSuccess());
    EXPECT_TRUE(work->getFuture()->hasError());
    try {
      r.backend.barrier({})->wait();
      ADD_FAILURE() << "a failed group works on";
    } catch (const BackendError& error) {
      EXPECT_EQ(error.context().peers, std::vector<int>{1});
    }
  });
}

TEST(ShmBackend, ShutdownFinishesWhatWasCalledAndClosesTheGroup) {
  on_ranks(2, [](const Rank& r) {
    Tensors tensors = {torch::ones({500'000})};
    const auto work = r.backend.allreduce(tensors, {});
    r.backend.shutdown();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(torch::equal(tensors[0], torch::full({500'000}, 2.0F)));
    EXPECT_THROW(r.backend.allreduce(tensors, {}), InvalidArgument);
    r.backend.shutdown();
  });
}

TEST(ShmBackend, SeveralThreadsOfARankMayCall) {
  // Equal operations, so that their order among the threads does not matter.
  on_ranks(2, [](const Rank& r) {
    test::on_threads(3, [&](int thread) {
      for (int i = 0; i < 50; ++i) {
        Tensors tensors = {torch::ones({100})};
        auto options = reduce_with(Op::SUM);
        options.asyncOp = thread == 0;
        r.backend.allreduce(tensors, options)->wait();
        ASSERT_TRUE(torch::equal(tensors[0], torch::full({100}, 2.0F)));
      }
    });
  });
}

TEST(ShmBackend, NeedsAllRanksOnOneHost) {
  EXPECT_THROW(create({.rank = 0, .world_size = 2}), Unsupported);
}

TEST(ShmBackend, HasAnUpperBoundOfRanks) {
  constexpr int kTooMany = 2049;
  EXPECT_THROW(
      create({.rank = 0,
              .world_size = kTooMany,
              .liveness = test::FakeHost::make(kTooMany)->liveness(0)}),
      Unsupported);
}

}  // namespace
}  // namespace lockstep::comm::shm
