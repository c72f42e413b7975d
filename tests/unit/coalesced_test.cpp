// Coalesced and uneven collectives; element i of tensor t of rank r is
// (7 i + 3 r + t) % 9.

#include "lockstep/distributed/coalesced.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/distributed/uneven.h"
#include "lockstep/testing/run_ranks.h"
#include "support/thread_backends.h"

namespace lockstep {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

const std::vector<std::vector<int64_t>> kShapes = {{5}, {2, 3}, {0}, {1}, {}};

Tensor values(int rank, int64_t tensor, int64_t numel) {
  return (torch::arange(numel) * 7 + rank * 3 + tensor) % 9;
}

/// One tensor per shape; with `ranks` times the rows where that is given.
Tensors inputs_of(int rank, c10::ScalarType dtype) {
  Tensors result;
  for (size_t t = 0; t < kShapes.size(); ++t) {
    result.push_back(values(rank,
                            static_cast<int64_t>(t),
                            c10::multiply_integers(kShapes[t]))
                         .view(kShapes[t])
                         .to(dtype));
  }
  return result;
}

void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(actual[i].equal(expected[i]))
        << "tensor " << i << ": " << actual[i] << expected[i];
  }
}

class Several : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] int ranks() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(int rank)>& fn) const {
    testing::run_ranks(ranks(), fn, {.backend = std::get<0>(GetParam())});
  }
};
using Coalesced = Several;
using Uneven = Several;

const auto kEach = ::testing::Combine(::testing::ValuesIn(thread_backends()),
                                      ::testing::Values(1, 2, 3));
std::string name_of(const ::testing::TestParamInfo<Several::ParamType>& info) {
  return std::get<0>(info.param) + "_" +
         std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Backends, Coalesced, kEach, name_of);
INSTANTIATE_TEST_SUITE_P(Backends, Uneven, kEach, name_of);

TEST_P(Coalesced, AllReduce) {
  run([&](int rank) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kInt}) {
      auto expected = inputs_of(0, dtype);
      for (int r = 1; r < ranks(); ++r) {
        const auto next = inputs_of(r, dtype);
        for (size_t i = 0; i < next.size(); ++i) {
          expected[i] = torch::maximum(expected[i], next[i]);
        }
      }
      for (const bool async_op : {false, true}) {
        auto tensors = inputs_of(rank, dtype);
        all_reduce_coalesced(tensors,
                             {.op = ReduceOp::MAX, .async_op = async_op})
            .wait();
        expect_equal(tensors, expected);
      }
    }
  });
}

TEST_P(Coalesced, AllReduceOfViewsLeavesTheRestAlone) {
  run([&](int rank) {
    const auto storage = torch::full({4, 6}, -1.0F);
    Tensors tensors = {storage.select(1, 2),
                       storage.select(1, 4).narrow(0, 1, 2)};
    for (auto& tensor : tensors) tensor.fill_(rank + 1);
    all_reduce_coalesced(tensors);
    auto expected = torch::full({4, 6}, -1.0F);
    const auto sum = static_cast<float>(ranks() * (ranks() + 1)) / 2;
    expected.select(1, 2).fill_(sum);
    expected.select(1, 4).narrow(0, 1, 2).fill_(sum);
    EXPECT_TRUE(storage.equal(expected));
  });
}

TEST_P(Coalesced, AllGather) {
  run([&](int rank) {
    std::vector<Tensors> lists;
    for (int r = 0; r < ranks(); ++r) {
      lists.push_back(inputs_of(0, torch::kFloat));
      for (auto& tensor : lists.back()) tensor.fill_(-1);
    }
    all_gather_coalesced(lists, inputs_of(rank, torch::kFloat));
    for (int r = 0; r < ranks(); ++r) {
      expect_equal(lists[static_cast<size_t>(r)], inputs_of(r, torch::kFloat));
    }
  });
}

TEST_P(Coalesced, AllGatherIntoTensor) {
  run([&](int rank) {
    Tensors outputs;
    Tensors expected;
    for (size_t t = 0; t < kShapes.size(); ++t) {
      Tensors parts;
      for (int r = 0; r < ranks(); ++r) {
        parts.push_back(inputs_of(r, torch::kFloat)[t].reshape(-1));
      }
      expected.push_back(torch::cat(parts));
      outputs.push_back(torch::full_like(expected.back(), -1));
    }
    all_gather_into_tensor_coalesced(
        outputs, inputs_of(rank, torch::kFloat), {.async_op = true})
        .wait();
    expect_equal(outputs, expected);
  });
}

TEST_P(Coalesced, ReduceScatterTensor) {
  run([&](int rank) {
    Tensors inputs;
    Tensors outputs;
    Tensors expected;
    for (const int64_t numel : {3, 0, 1, 7}) {
      inputs.push_back(values(rank, numel, numel * ranks()).to(torch::kFloat));
      outputs.push_back(torch::full({numel}, -1.0F));
      auto sum = torch::zeros({numel * ranks()});
      for (int r = 0; r < ranks(); ++r) {
        sum += values(r, numel, numel * ranks());
      }
      expected.push_back(sum.narrow(0, rank * numel, numel));
    }
    reduce_scatter_tensor_coalesced(outputs, inputs);
    expect_equal(outputs, expected);
  });
}

TEST_P(Coalesced, WrongArguments) {
  run([&](int) {
    Tensors none;
    EXPECT_THROW(all_reduce_coalesced(none), InvalidArgument);
    Tensors mixed = {torch::ones({2}), torch::ones({2}, torch::kInt)};
    EXPECT_THROW(all_reduce_coalesced(mixed), InvalidArgument);
    Tensors one = {torch::ones({2})};
    Tensors two = {torch::ones({2}), torch::ones({2})};
    EXPECT_THROW(all_gather_into_tensor_coalesced(one, two), InvalidArgument);
    Tensors wrong = {torch::ones({2 * ranks() + 1})};
    EXPECT_THROW(all_gather_into_tensor_coalesced(wrong, one), InvalidArgument);
    EXPECT_THROW(reduce_scatter_tensor_coalesced(one, wrong), InvalidArgument);
    std::vector<Tensors> lists;
    EXPECT_THROW(all_gather_coalesced(lists, one), InvalidArgument);
  });
}

TEST_P(Several, NewerNamesOfTheSame) {
  run([&](int rank) {
    auto sum = torch::zeros({2});
    reduce_scatter_single(sum, torch::full({2 * ranks()}, rank + 1.0F));
    EXPECT_TRUE(sum.equal(
        torch::full({2}, static_cast<float>(ranks() * (ranks() + 1)) / 2)));
    auto all = torch::zeros({ranks()});
    all_gather_single(all, torch::full({1}, static_cast<float>(rank)));
    EXPECT_TRUE(all.equal(torch::arange(ranks()).to(torch::kFloat)));
  });
}

/// Rank r contributes 3 r elements.
TEST_P(Uneven, AllGather) {
  run([&](int rank) {
    for (const bool async_op : {false, true}) {
      Tensors outputs;
      Tensors expected;
      for (int r = 0; r < ranks(); ++r) {
        outputs.push_back(torch::full({3 * r}, -1));
        expected.push_back(values(r, 0, 3 * r));
      }
      all_gather_v(outputs, values(rank, 0, 3 * rank), {.async_op = async_op})
          .wait();
      expect_equal(outputs, expected);
    }
  });
}

/// Rank r gets r + 1 elements.
TEST_P(Uneven, ReduceScatter) {
  run([&](int rank) {
    for (const auto dtype : {torch::kDouble, torch::kHalf, torch::kLong}) {
      for (const auto op : {ReduceOp::SUM, ReduceOp::MIN, ReduceOp::AVG}) {
        Tensors inputs;
        for (int r = 0; r < ranks(); ++r) {
          inputs.push_back(values(rank, r, r + 1).to(dtype));
        }
        auto expected = values(0, rank, rank + 1);
        for (int r = 1; r < ranks(); ++r) {
          const auto next = values(r, rank, rank + 1);
          expected = op == ReduceOp::MIN ? torch::minimum(expected, next)
                                         : expected + next;
        }
        if (op == ReduceOp::AVG) {
          expected =
              dtype == torch::kLong
                  ? torch::div(expected, ranks(), "trunc")
                  : expected.to(dtype == torch::kHalf ? torch::kFloat : dtype) /
                        ranks();
        }
        auto output = torch::full({rank + 1}, 77, dtype);
        reduce_scatter_v(output, inputs, {.op = op});
        EXPECT_TRUE(output.equal(expected.to(dtype))) << output << expected;
      }
    }
  });
}

TEST_P(Uneven, LengthsThatDifferAreNamedOnAllRanks) {
  if (ranks() < 2) return;  // there is nobody to differ from
  run([&](int rank) {
    Tensors outputs;
    for (int r = 0; r < ranks(); ++r) outputs.push_back(torch::zeros({2}));
    if (rank == 0) outputs[1] = torch::zeros({5});
    EXPECT_THROW(all_gather_v(outputs, torch::ones({2})), MismatchError);
  });
}

TEST_P(Uneven, WrongArguments) {
  run([&](int) {
    Tensors none;
    auto output = torch::zeros({2});
    EXPECT_THROW(all_gather_v(none, output), InvalidArgument);
    EXPECT_THROW(reduce_scatter_v(output, none), InvalidArgument);
    Tensors longer(static_cast<size_t>(ranks()), torch::zeros({3}));
    EXPECT_THROW(all_gather_v(longer, output), InvalidArgument);
    EXPECT_THROW(reduce_scatter_v(output, longer), InvalidArgument);
  });
}

TEST_P(Several, InAGroupOfSomeRanks) {
  run([&](int rank) {
    const auto alone = new_group({0});
    Tensors tensors = {torch::full({2}, rank)};
    all_reduce_coalesced(tensors, {.group = alone});
    EXPECT_TRUE(tensors[0].equal(torch::full({2}, rank)));
  });
}
INSTANTIATE_TEST_SUITE_P(Backends, Several, kEach, name_of);

}  // namespace
}  // namespace lockstep
