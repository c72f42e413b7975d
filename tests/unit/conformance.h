#pragma once

// One table for every backend: what each collective gives, for every dtype,
// operation and odd size, and which errors it raises. Ranks are threads, except
// those of MPI: under mpirun this process is one of them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep {

using at::Tensor;

inline constexpr c10::ScalarType kReducible[] = {at::kByte,
                                                 at::kChar,
                                                 at::kShort,
                                                 at::kInt,
                                                 at::kLong,
                                                 at::kHalf,
                                                 at::kBFloat16,
                                                 at::kFloat,
                                                 at::kDouble};
inline constexpr c10::ScalarType kOnlyMovable[] = {
    at::kBool, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn};
inline constexpr ReduceOp kOps[] = {ReduceOp::SUM,
                                    ReduceOp::AVG,
                                    ReduceOp::PRODUCT,
                                    ReduceOp::MIN,
                                    ReduceOp::MAX};
inline constexpr int64_t kSizes[] = {0, 1, 7, 1025};

/// Element i of rank r as a whole number: from -4 to 4, for unsigned dtypes
/// from 0 to 8.
Tensor input_of(int rank, int64_t numel, c10::ScalarType dtype);

/// What a reduction of all ranks' inputs must give, computed with libtorch's
/// whole numbers; they fit every dtype or wrap as they are converted.
Tensor reduced(ReduceOp op, int ranks, int64_t numel, c10::ScalarType dtype);

bool same(const Tensor& actual, const Tensor& expected);

#define EXPECT_SAME(actual, expected, what) \
  EXPECT_TRUE(same(actual, expected)) << (what) << "\n" << (actual)

/// `call` must throw E with `part` in its text.
template <class E>
void expect_error(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "no error, expected: " << part;
  } catch (const E& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another error: " << e.what();
  }
}

/// A backend and a number of ranks.
using ConformanceCase = std::tuple<std::string, int>;

/// Each backend with each number of ranks; under mpirun "mpi" with the job's.
std::vector<ConformanceCase> cases(const std::vector<int>& ranks);

class Conformance : public ::testing::TestWithParam<ConformanceCase> {
 protected:
  [[nodiscard]] int ranks() const { return std::get<1>(GetParam()); }
  /// All, but with "hybrid", whose ranks count as on two hosts.
  [[nodiscard]] int ranks_per_host() const;
  /// How many of the ranks are in this process: all or one.
  [[nodiscard]] int ranks_here() const;
  [[nodiscard]] bool is_here(int rank) const;

  /// `fn` as every rank that is here, each in a group of its own.
  void run(const std::function<void(int rank)>& fn,
           std::chrono::milliseconds timeout = std::chrono::seconds(60)) const;
};

std::string name_of(const ::testing::TestParamInfo<ConformanceCase>& info);

}  // namespace lockstep
