#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
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

/// Memory that starts `shift` bytes after an aligned address, with the tensor's
/// bytes (else filler), between bytes that nobody may write.
class Stretch {
 public:
  Stretch(size_t bytes, size_t shift)
      : memory_(bytes + shift + 1, 'x'), shift_(shift) {}
  Stretch(const torch::Tensor& tensor, size_t shift)
      : Stretch(tensor.nbytes(), shift) {
    if (tensor.numel() > 0) {
      std::memcpy(data(), tensor.data_ptr(), tensor.nbytes());
    }
  }
  char* data() { return memory_.data() + shift_; }
  [[nodiscard]] bool equals(const torch::Tensor& tensor) const {
    return std::count(memory_.begin(), memory_.begin() + shift_, 'x') ==
               static_cast<std::ptrdiff_t>(shift_) &&
           memory_.back() == 'x' &&
           (tensor.numel() == 0 || std::memcmp(memory_.data() + shift_,
                                               tensor.data_ptr(),
                                               tensor.nbytes()) == 0);
  }

 private:
  std::vector<char> memory_;
  size_t shift_;
};

class TwoRanksKernels : public ::testing::TestWithParam<c10::ScalarType> {
 protected:
  static bool integral() { return c10::isIntegralType(GetParam(), false); }

  /// Numbers of both signs whose sums are rounded. Six of each line are such
  /// that the order shows, or that a wrong operation does.
  static torch::Tensor numbers(int64_t lines, bool first) {
    const auto dtype = GetParam();
    const auto n = lines * 64 / static_cast<int64_t>(c10::elementSize(dtype));
    auto result = (torch::randn({n}, torch::kDouble) * 4e8).to(dtype);
    if (n == 0 || integral()) return result;
    constexpr double kInf = std::numeric_limits<double>::infinity();
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    const auto special =
        first ? torch::tensor({0.0, -0.0, kInf, 1.0, kNan, 1.0})
              : torch::tensor({-0.0, 0.0, 1.0, -kInf, 1.0, kNan});
    result.view({lines, -1}).narrow(1, 2, 6).copy_(special);
    return result;
  }

  /// op by libtorch, which computes elements one by one.
  static torch::Tensor by_torch(ReduceOp op,
                                const torch::Tensor& a,
                                const torch::Tensor& b) {
    switch (op) {
      case ReduceOp::SUM:
        return a + b;
      case ReduceOp::AVG:
        return (a + b) / 2;
      case ReduceOp::PRODUCT:
        return a * b;
      case ReduceOp::MIN:
        return torch::minimum(a, b);
      case ReduceOp::MAX:
        return torch::maximum(a, b);
    }
    return {};
  }

  /// The bits of `reduce`, which by its other tests takes the first of equals.
  static torch::Tensor by_reduce(ReduceOp op,
                                 const torch::Tensor& a,
                                 const torch::Tensor& b) {
    auto result = torch::empty_like(a);
    const void* srcs[] = {a.data_ptr(), b.data_ptr()};
    kernels::reduce(op, GetParam(), result.data_ptr(), srcs, 2, a.numel());
    const auto exact = by_torch(op, a, b);
    EXPECT_TRUE(integral() ? result.equal(exact)
                           : result.allclose(exact, 0, 0, /*equal_nan=*/true));
    return result;
  }
};

TEST_P(TwoRanksKernels, ExchangeReducesAndMovesTheRest) {
  torch::manual_seed(1);
  for (const int64_t lines : {0, 1, 2, 9, 1000}) {
    for (const auto op : kOps) {
      const auto kernel = kernels::exchange_kernel(op, GetParam());
      ASSERT_EQ(kernel == nullptr, op == ReduceOp::AVG && integral());
      if (kernel == nullptr) continue;
      const auto first = numbers(lines, true);
      const auto second = numbers(lines, false);
      const auto given = numbers(lines, true);
      const auto taken = numbers(lines, false);
      const auto want = by_reduce(op, first, second);
      for (const size_t shift : {0, 1, 3}) {
        for (const bool own_is_first : {true, false}) {
          Stretch own(own_is_first ? first : second, shift);
          Stretch peers(own_is_first ? second : first, shift);
          Stretch give_from(given, shift);
          Stretch take_from(taken, shift);
          Stretch give_to(want.nbytes(), shift);
          Stretch take_to(want.nbytes(), shift);
          kernel({.give_to = give_to.data(),
                  .give_from = give_from.data(),
                  .own = own.data(),
                  .peers = peers.data(),
                  .own_is_first = own_is_first,
                  .take_to = take_to.data(),
                  .take_from = take_from.data(),
                  .bytes = want.nbytes()});
          EXPECT_TRUE(own.equals(want)) << static_cast<int>(op);
          EXPECT_TRUE(peers.equals(want)) << static_cast<int>(op);
          EXPECT_TRUE(give_to.equals(given));
          EXPECT_TRUE(take_to.equals(taken));
        }
      }
    }
  }
}

TEST(TwoRanksKernels, TradeMovesBothLengths) {
  torch::manual_seed(3);
  const auto given = torch::randint(256, {1000}, torch::kByte);
  const auto taken = torch::randint(256, {1000}, torch::kByte);
  for (const int64_t give : {0, 1, 63, 64, 130, 1000}) {
    for (const int64_t take : {0, 1, 64, 65, 512, 999}) {
      for (const size_t shift : {0, 1, 3}) {
        Stretch give_from(given.narrow(0, 0, give), shift);
        Stretch take_from(taken.narrow(0, 0, take), shift);
        Stretch give_to(static_cast<size_t>(give), shift);
        Stretch take_to(static_cast<size_t>(take), shift);
        kernels::trade({.give_to = give_to.data(),
                        .give_from = give_from.data(),
                        .give_bytes = static_cast<size_t>(give),
                        .take_to = take_to.data(),
                        .take_from = take_from.data(),
                        .take_bytes = static_cast<size_t>(take)});
        EXPECT_TRUE(give_to.equals(given.narrow(0, 0, give)));
        EXPECT_TRUE(take_to.equals(taken.narrow(0, 0, take)));
      }
    }
  }
  kernels::trade({});  // nothing to nowhere
}

TEST_P(TwoRanksKernels, AverageBothGivesBothTheAverage) {
  torch::manual_seed(2);
  const auto kernel = kernels::average_both_kernel(GetParam());
  ASSERT_EQ(kernel == nullptr, integral());
  if (kernel == nullptr) return;
  for (const int64_t lines : {0, 1, 2, 9, 1000}) {
    const auto a = numbers(lines, true);
    const auto b = numbers(lines, false);
    const auto want = by_reduce(ReduceOp::AVG, a, b);
    for (const size_t shift : {0, 1, 3}) {
      Stretch first(a, shift);
      Stretch second(b, shift);
      kernel(first.data(), second.data(), want.nbytes());
      EXPECT_TRUE(first.equals(want));
      EXPECT_TRUE(second.equals(want));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    TwoRanksKernels,
    ::testing::Values(torch::kFloat, torch::kDouble, torch::kInt, torch::kLong),
    [](const auto& param) { return std::string(c10::toString(param.param)); });

TEST(TwoRanksKernels, OtherDtypesHaveNone) {
  for (const auto dtype : {torch::kHalf,
                           torch::kBFloat16,
                           torch::kBool,
                           torch::kByte,
                           torch::kChar,
                           torch::kShort,
                           torch::kUInt32,
                           torch::kUInt64}) {
    EXPECT_EQ(kernels::exchange_kernel(ReduceOp::MAX, dtype), nullptr);
    EXPECT_EQ(kernels::average_both_kernel(dtype), nullptr);
  }
}

TEST(ReduceKernel, OfTwoZerosTheFirstIsTaken) {
  for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
    const auto got = reduce_values<float>(
        op, torch::kFloat, {{0.0F, -0.0F, 0.0F}, {-0.0F, 0.0F, 0.0F}});
    EXPECT_FALSE(std::signbit(got[0]));
    EXPECT_TRUE(std::signbit(got[1]));
    EXPECT_FALSE(std::signbit(got[2]));
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
