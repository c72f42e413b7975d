#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "comm/kernels/reduce.h"
#include "comm/kernels/two_ranks.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::SUM,
                             ReduceOp::AVG,
                             ReduceOp::PRODUCT,
                             ReduceOp::MIN,
                             ReduceOp::MAX};

/// Small whole numbers, so that every type holds every result exactly.
int64_t value(int source, size_t i) {
  return 1 +
         static_cast<int64_t>((i * 7 + static_cast<size_t>(source) * 3) % 4);
}

int64_t expected(ReduceOp op, int n_srcs, size_t i) {
  int64_t result = value(0, i);
  for (int s = 1; s < n_srcs; ++s) {
    const int64_t v = value(s, i);
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        result += v;
        break;
      case ReduceOp::PRODUCT:
        result *= v;
        break;
      case ReduceOp::MIN:
        result = std::min(result, v);
        break;
      case ReduceOp::MAX:
        result = std::max(result, v);
        break;
    }
  }
  return result;
}

class ReduceKernel : public ::testing::TestWithParam<c10::ScalarType> {};

TEST_P(ReduceKernel, GivesTheFormulaForEveryOperationSizeAndAlignment) {
  const auto dtype = GetParam();
  const size_t element = c10::elementSize(dtype);
  const bool integral = c10::isIntegralType(dtype, false);
  for (const size_t n : {0, 1, 7, 8, 33, 1023, 1024, 1025, 5000}) {
    for (const int n_srcs : {1, 2, 3, 4}) {
      for (const size_t shift : {0, 1, 3}) {
        std::vector<std::vector<char>> memory;
        std::vector<const void*> srcs;
        for (int s = 0; s < n_srcs; ++s) {
          auto source = torch::empty({static_cast<int64_t>(n)}, torch::kLong);
          for (size_t i = 0; i < n; ++i) {
            source.data_ptr<int64_t>()[i] = value(s, i);
          }
          source = source.to(dtype);
          memory.emplace_back(n * element + shift + 1);
          if (n > 0) {
            std::memcpy(
                memory.back().data() + shift, source.data_ptr(), n * element);
          }
          srcs.push_back(memory.back().data() + shift);
        }
        for (const auto op : kOps) {
          std::vector<char> result(n * element + shift + 1, 'x');
          kernels::reduce(
              op, dtype, result.data() + shift, srcs.data(), n_srcs, n);
          EXPECT_EQ(result.back(), 'x') << "written beyond the end";
          auto got = torch::empty({static_cast<int64_t>(n)}, dtype);
          if (n > 0) {
            std::memcpy(got.data_ptr(), result.data() + shift, n * element);
          }
          auto want = torch::empty_like(got, torch::kDouble);
          for (size_t i = 0; i < n; ++i) {
            auto v = static_cast<double>(expected(op, n_srcs, i));
            if (op == ReduceOp::AVG) v /= n_srcs;
            want.data_ptr<double>()[i] = integral ? std::trunc(v) : v;
          }
          EXPECT_TRUE(torch::equal(got, want.to(dtype)))
              << "op " << static_cast<int>(op) << " n " << n << " sources "
              << n_srcs << " shift " << shift;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes,
                         ReduceKernel,
                         ::testing::Values(torch::kFloat,
                                           torch::kDouble,
                                           torch::kHalf,
                                           torch::kBFloat16,
                                           torch::kChar,
                                           torch::kShort,
                                           torch::kInt,
                                           torch::kLong,
                                           torch::kByte,
                                           torch::kUInt16,
                                           torch::kUInt32,
                                           torch::kUInt64),
                         [](const auto& param) {
                           return std::string(c10::toString(param.param));
                         });

template <class T>
std::vector<T> reduce_values(ReduceOp op,
                             c10::ScalarType dtype,
                             const std::vector<std::vector<T>>& sources) {
  std::vector<const void*> srcs;
  for (const auto& source : sources) srcs.push_back(source.data());
  std::vector<T> result(sources[0].size());
  kernels::reduce(op,
                  dtype,
                  result.data(),
                  srcs.data(),
                  static_cast<int>(srcs.size()),
                  result.size());
  return result;
}

TEST(ReduceKernel, NegativeAveragesTruncateTowardZero) {
  EXPECT_EQ(reduce_values<int8_t>(
                ReduceOp::AVG, torch::kChar, {{-3, -128, 3}, {0, -1, 4}}),
            (std::vector<int8_t>{-1, -64, 3}));
  EXPECT_EQ(reduce_values<int32_t>(
                ReduceOp::AVG, torch::kInt, {{-3, INT32_MAX}, {0, 0}}),
            (std::vector<int32_t>{-1, INT32_MAX / 2}));
  EXPECT_EQ(reduce_values<int64_t>(
                ReduceOp::AVG, torch::kLong, {{-7, INT64_MAX}, {2, 0}}),
            (std::vector<int64_t>{-2, INT64_MAX / 2}));
}

TEST(ReduceKernel, AnAverageFitsWhereTheSumDoesNot) {
  EXPECT_EQ(reduce_values<uint8_t>(
                ReduceOp::AVG, torch::kByte, {{200, 255}, {200, 255}}),
            (std::vector<uint8_t>{200, 255}));
  EXPECT_EQ(
      reduce_values<int16_t>(
          ReduceOp::AVG, torch::kShort, {{-32768, 32767}, {-32768, 32766}}),
      (std::vector<int16_t>{-32768, 32766}));
  EXPECT_EQ(reduce_values<int32_t>(ReduceOp::AVG,
                                   torch::kInt,
                                   {{INT32_MAX, INT32_MIN, INT32_MIN},
                                    {INT32_MAX, INT32_MIN, INT32_MIN},
                                    {INT32_MAX, INT32_MIN, INT32_MIN + 1}}),
            (std::vector<int32_t>{INT32_MAX, INT32_MIN, INT32_MIN + 1}));
  EXPECT_EQ(
      reduce_values<uint32_t>(
          ReduceOp::AVG, torch::kUInt32, {{UINT32_MAX}, {UINT32_MAX - 2}}),
      (std::vector<uint32_t>{UINT32_MAX - 1}));
}

TEST(ReduceKernel, IntegersWrapAsTorchDoes) {
  EXPECT_EQ(reduce_values<uint8_t>(ReduceOp::SUM, torch::kByte, {{200}, {100}}),
            std::vector<uint8_t>{44});
  EXPECT_EQ(reduce_values<uint16_t>(
                ReduceOp::PRODUCT, torch::kUInt16, {{65535}, {65535}}),
            std::vector<uint16_t>{1});
  EXPECT_EQ(
      reduce_values<int64_t>(ReduceOp::SUM, torch::kLong, {{INT64_MAX}, {1}}),
      std::vector<int64_t>{INT64_MIN});
}

TEST(ReduceKernel, MinAndMaxPropagateNanFromAnySource) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
    for (const auto dtype :
         {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
      auto a = torch::ones({19}).to(dtype);
      auto b = torch::zeros({19}).to(dtype);
      auto c = torch::ones({19}).to(dtype);
      a[1] = b[2] = c[18] = nan;
      auto got = torch::empty_like(a);
      const void* srcs[] = {a.data_ptr(), b.data_ptr(), c.data_ptr()};
      kernels::reduce(op, dtype, got.data_ptr(), srcs, 3, 19);
      auto want = op == ReduceOp::MIN ? torch::minimum(torch::minimum(a, b), c)
                                      : torch::maximum(torch::maximum(a, b), c);
      EXPECT_TRUE(torch::allclose(got.to(torch::kDouble),
                                  want.to(torch::kDouble),
                                  0,
                                  0,
                                  /*equal_nan=*/true));
      EXPECT_TRUE(got[1].isnan().item<bool>());
      EXPECT_TRUE(got[2].isnan().item<bool>());
      EXPECT_TRUE(got[18].isnan().item<bool>());
    }
  }
}

TEST(ReduceKernel, SixteenBitTypesRoundOnceToNearestEven) {
  torch::manual_seed(1);
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    std::vector<torch::Tensor> sources;
    std::vector<const void*> srcs;
    auto sum = torch::zeros({4099});
    for (int s = 0; s < 5; ++s) {
      sources.push_back((torch::randn({4099}) * 1000).to(dtype));
      srcs.push_back(sources.back().data_ptr());
      sum = s == 0 ? sources[0].to(torch::kFloat)
                   : sum + sources.back().to(torch::kFloat);
    }
    auto got = torch::empty_like(sources[0]);
    kernels::reduce(ReduceOp::SUM, dtype, got.data_ptr(), srcs.data(), 5, 4099);
    EXPECT_TRUE(torch::equal(got, sum.to(dtype)));
  }
}

TEST(ReduceKernel, SixteenBitConversionsKeepEveryBitPattern) {
  // Adding zero (as the other source) passes every value through both
  // conversions.
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    auto all = torch::arange(0, 65536, torch::kInt)
                   .to(torch::kShort)
                   .view(dtype)
                   .contiguous();
    auto zero = torch::zeros_like(all);
    auto got = torch::empty_like(all);
    const void* srcs[] = {all.data_ptr(), zero.data_ptr()};
    kernels::reduce(ReduceOp::SUM, dtype, got.data_ptr(), srcs, 2, 65536);
    auto numbers = all.isnan().logical_not();
    EXPECT_TRUE(torch::equal(got.isnan(), all.isnan()));
    EXPECT_TRUE(
        torch::equal(got.masked_select(numbers), all.masked_select(numbers)));
  }
}

TEST(ReduceKernel, ResultMayOverwriteAnySource) {
  for (size_t target = 0; target < 3; ++target) {
    std::vector<std::vector<float>> sources(3, std::vector<float>(3000));
    std::vector<const void*> srcs;
    for (size_t s = 0; s < 3; ++s) {
      for (size_t i = 0; i < 3000; ++i) {
        sources[s][i] = static_cast<float>(value(static_cast<int>(s), i));
      }
      srcs.push_back(sources[s].data());
    }
    kernels::reduce(ReduceOp::SUM,
                    torch::kFloat,
                    sources[target].data(),
                    srcs.data(),
                    3,
                    3000);
    for (size_t i = 0; i < 3000; ++i) {
      ASSERT_EQ(sources[target][i],
                static_cast<float>(expected(ReduceOp::SUM, 3, i)));
    }
  }
}

class TwoRanksKernels : public ::testing::TestWithParam<c10::ScalarType> {};

TEST_P(TwoRanksKernels, GiveTheBitsOfReduceAndMoveTheRest) {
  const auto dtype = GetParam();
  torch::manual_seed(1);
  // Negative ones, and sums and products that are rounded or wrap.
  const auto numbers = [&](int64_t n) {
    return (torch::randn({n}, torch::kDouble) * 1e9).to(dtype);
  };
  for (const int64_t lines : {0, 1, 2, 9, 1000}) {
    const int64_t n =
        lines * 64 /
        static_cast<int64_t>(
            dtype == torch::kFloat || dtype == torch::kInt ? 4 : 8);
    for (const auto op : kOps) {
      const auto first = numbers(n);
      const auto second = numbers(n);
      const auto given = numbers(n);
      const auto taken = numbers(n);
      auto want = torch::empty_like(first);
      const void* srcs[] = {first.data_ptr(), second.data_ptr()};
      kernels::reduce(op, dtype, want.data_ptr(), srcs, 2, want.numel());
      const auto bytes = [](const torch::Tensor& t) {
        return static_cast<char*>(t.data_ptr());
      };
      const auto exchange = kernels::exchange_kernel(op, dtype);
      const auto reduce_both = kernels::reduce_both_kernel(op, dtype);
      const bool none =
          op == ReduceOp::AVG && c10::isIntegralType(dtype, false);
      ASSERT_EQ(exchange == nullptr, none);
      ASSERT_EQ(reduce_both == nullptr, none);
      if (none) continue;
      for (const bool own_is_first : {true, false}) {
        auto own = own_is_first ? first.clone() : second.clone();
        auto give_to = torch::empty_like(own);
        auto result = torch::empty_like(own);
        auto take_to = torch::empty_like(own);
        exchange({.give_to = bytes(give_to),
                  .give_from = bytes(given),
                  .first = bytes(own_is_first ? own : first),
                  .second = bytes(own_is_first ? second : own),
                  .own = bytes(own),
                  .result = bytes(result),
                  .take_to = bytes(take_to),
                  .take_from = bytes(taken),
                  .bytes = own.nbytes()});
        EXPECT_TRUE(own.equal(want)) << static_cast<int>(op);
        EXPECT_TRUE(result.equal(want));
        EXPECT_TRUE(give_to.equal(given));
        EXPECT_TRUE(take_to.equal(taken));
      }
      auto left = first.clone();
      auto right = second.clone();
      reduce_both(bytes(left), bytes(right), left.nbytes());
      EXPECT_TRUE(left.equal(want)) << static_cast<int>(op);
      EXPECT_TRUE(right.equal(want));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    TwoRanksKernels,
    ::testing::Values(torch::kFloat, torch::kDouble, torch::kInt, torch::kLong),
    [](const auto& param) { return std::string(c10::toString(param.param)); });

TEST(TwoRanksKernels, OthersHaveNone) {
  for (const auto dtype :
       {torch::kHalf, torch::kBFloat16, torch::kBool, torch::kShort}) {
    EXPECT_EQ(kernels::exchange_kernel(ReduceOp::MAX, dtype), nullptr);
    EXPECT_EQ(kernels::reduce_both_kernel(ReduceOp::MAX, dtype), nullptr);
  }
}

TEST(ReduceKernel, BoolHasMinAndMaxOnly) {
  const uint8_t a[] = {0, 0, 1, 1};
  const uint8_t b[] = {0, 1, 0, 1};
  const void* srcs[] = {a, b};
  uint8_t got[4];
  kernels::reduce(ReduceOp::MIN, torch::kBool, got, srcs, 2, 4);
  EXPECT_EQ(std::vector<uint8_t>(got, got + 4),
            (std::vector<uint8_t>{0, 0, 0, 1}));
  kernels::reduce(ReduceOp::MAX, torch::kBool, got, srcs, 2, 4);
  EXPECT_EQ(std::vector<uint8_t>(got, got + 4),
            (std::vector<uint8_t>{0, 1, 1, 1}));
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT}) {
    EXPECT_THROW(kernels::reduce(op, torch::kBool, got, srcs, 2, 4),
                 Unsupported);
  }
}

TEST(ReduceKernel, OtherTypesAreRefused) {
  const double a[4] = {};
  const void* srcs[] = {a, a};
  double got[4];
  EXPECT_FALSE(kernels::can_reduce(ReduceOp::SUM, torch::kComplexFloat));
  EXPECT_THROW(
      kernels::reduce(ReduceOp::SUM, torch::kComplexFloat, got, srcs, 2, 2),
      Unsupported);
  EXPECT_THROW(
      kernels::reduce(ReduceOp::MAX, torch::kFloat8_e5m2, got, srcs, 2, 2),
      Unsupported);
}

}  // namespace
}  // namespace lockstep::comm
