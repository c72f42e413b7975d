// One table for every backend: what each collective gives, for every dtype,
// operation and odd size, and which errors it raises. Ranks are threads.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/backend_registry.h"
#include "core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using at::Tensor;

constexpr c10::ScalarType kReducible[] = {at::kByte,
                                          at::kChar,
                                          at::kShort,
                                          at::kInt,
                                          at::kLong,
                                          at::kHalf,
                                          at::kBFloat16,
                                          at::kFloat,
                                          at::kDouble};
constexpr c10::ScalarType kOnlyMovable[] = {
    at::kBool, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn};
constexpr ReduceOp kOps[] = {ReduceOp::SUM,
                             ReduceOp::AVG,
                             ReduceOp::PRODUCT,
                             ReduceOp::MIN,
                             ReduceOp::MAX};
constexpr int64_t kSizes[] = {0, 1, 7, 1025};

/// Element i of rank r as a whole number: from -4 to 4, for unsigned dtypes
/// from 0 to 8.
Tensor whole(int rank, int64_t numel, c10::ScalarType dtype) {
  const auto numbers = (at::arange(numel, at::kLong) * 7 + rank * 3) % 9;
  const bool has_negatives = dtype != at::kByte && dtype != at::kBool;
  return has_negatives ? numbers - 4 : numbers;
}

Tensor input_of(int rank, int64_t numel, c10::ScalarType dtype) {
  return whole(rank, numel, dtype).to(dtype);
}

/// What a reduction of all ranks' inputs must give, computed with libtorch's
/// whole numbers; they fit every dtype or wrap as they are converted.
Tensor reduced(ReduceOp op, int ranks, int64_t numel, c10::ScalarType dtype) {
  auto result = whole(0, numel, dtype);
  for (int rank = 1; rank < ranks; ++rank) {
    const auto next = whole(rank, numel, dtype);
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        result = result + next;
        break;
      case ReduceOp::PRODUCT:
        result = result * next;
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, next);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, next);
        break;
    }
  }
  if (op == ReduceOp::AVG) {
    if (at::isIntegralType(dtype, /*includeBool=*/false)) {
      return at::div(result, ranks, "trunc").to(dtype);
    }
    const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    return (result.to(wide) / ranks).to(dtype);
  }
  return result.to(dtype);
}

bool same(const Tensor& actual, const Tensor& expected) {
  if (actual.scalar_type() == at::kFloat8_e4m3fn) {
    return actual.view(at::kByte).equal(expected.view(at::kByte));
  }
  return actual.equal(expected);
}

std::vector<std::string> backends() {
  std::vector<std::string> names;
  for (const auto& name : comm::available_backends()) {
    // On one host hybrid is shm.
    if (name != "hybrid") names.push_back(name);
  }
  return names;
}

class Conformance
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] std::string backend() const { return std::get<0>(GetParam()); }
  [[nodiscard]] int ranks() const { return std::get<1>(GetParam()); }

  void run(const std::function<void(int rank)>& fn,
           std::chrono::milliseconds timeout = 60s) const {
    testing::run_ranks(ranks(), fn, {.backend = backend(), .timeout = timeout});
  }
};

std::string name_of(
    const ::testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return std::get<0>(info.param) + '_' +
         std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         Conformance,
                         ::testing::Combine(::testing::ValuesIn(backends()),
                                            ::testing::Values(1, 2, 3, 5)),
                         name_of);

#define EXPECT_SAME(actual, expected, what) \
  EXPECT_TRUE(same(actual, expected)) << (what) << "\n" << (actual)

TEST_P(Conformance, Reductions) {
  const int n = ranks();
  run([&](int rank) {
    for (const auto dtype : kReducible) {
      for (const auto op : kOps) {
        for (const auto numel : kSizes) {
          const std::string what = std::string(c10::toString(dtype)) +
                                   " operation " +
                                   std::to_string(static_cast<int>(op)) + ", " +
                                   std::to_string(numel) + " elements";
          const auto expected = reduced(op, n, numel, dtype);
          auto tensor = input_of(rank, numel, dtype);
          all_reduce(tensor, {.op = op});
          EXPECT_SAME(tensor, expected, "all_reduce " + what);

          const auto whole_expected = reduced(op, n, numel * n, dtype);
          const auto chunk = whole_expected.narrow(0, rank * numel, numel);
          const auto input = input_of(rank, numel * n, dtype);
          auto output = at::zeros({numel}, dtype);
          reduce_scatter_tensor(output, input, {.op = op});
          EXPECT_SAME(output, chunk, "reduce_scatter_tensor " + what);

          output.zero_();
          reduce_scatter(
              output,
              numel > 0 ? input.split(numel) : std::vector<Tensor>(n, input),
              {.op = op});
          EXPECT_SAME(output, chunk, "reduce_scatter " + what);

          const int dst = static_cast<int>(numel % n);
          tensor = input_of(rank, numel, dtype);
          reduce(tensor, {.dst = dst, .op = op});
          EXPECT_SAME(tensor,
                      rank == dst ? expected : input_of(rank, numel, dtype),
                      "reduce " + what);
        }
      }
    }
  });
}

std::vector<c10::ScalarType> movable() {
  std::vector<c10::ScalarType> dtypes(std::begin(kReducible),
                                      std::end(kReducible));
  dtypes.insert(dtypes.end(), std::begin(kOnlyMovable), std::end(kOnlyMovable));
  return dtypes;
}

TEST_P(Conformance, Moves) {
  const int n = ranks();
  run([&](int rank) {
    for (const auto dtype : movable()) {
      for (const auto numel : kSizes) {
        const std::string what = std::string(c10::toString(dtype)) + ", " +
                                 std::to_string(numel) + " elements";
        const auto input = input_of(rank, numel, dtype);
        for (int src = 0; src < n; ++src) {
          auto tensor = input.clone();
          broadcast(tensor, {.src = src});
          EXPECT_SAME(tensor, input_of(src, numel, dtype), "broadcast " + what);
        }
        std::vector<Tensor> outputs;
        for (int r = 0; r < n; ++r) {
          outputs.push_back(at::empty({numel}, dtype));
        }
        all_gather(outputs, input);
        auto joined = at::empty({numel * n}, dtype);
        all_gather_into_tensor(joined, input);
        for (int r = 0; r < n; ++r) {
          const auto expected = input_of(r, numel, dtype);
          EXPECT_SAME(outputs[r], expected, "all_gather " + what);
          EXPECT_SAME(joined.narrow(0, r * numel, numel),
                      expected,
                      "all_gather_into_tensor " + what);
        }
      }
    }
  });
}

TEST_P(Conformance, GatherAndScatter) {
  const int n = ranks();
  run([&](int rank) {
    for (const auto dtype : movable()) {
      for (const auto numel : kSizes) {
        const std::string what = std::string(c10::toString(dtype)) + ", " +
                                 std::to_string(numel) + " elements";
        const auto input = input_of(rank, numel, dtype);
        for (int root = 0; root < n; ++root) {
          std::vector<Tensor> list;
          auto output = at::zeros({numel}, at::kByte).to(dtype);
          if (rank == root) {
            for (int r = 0; r < n; ++r) {
              list.push_back(at::zeros({numel}, at::kByte).to(dtype));
            }
            gather(input, list, {.dst = root});
            for (int r = 0; r < n; ++r) {
              EXPECT_SAME(list[r], input_of(r, numel, dtype), "gather " + what);
            }
            for (int r = 0; r < n; ++r) {
              list[r] = input_of(3 * root + r, numel, dtype);
            }
            scatter(output, list, {.src = root});
          } else {
            gather(input, {.dst = root});
            scatter(output, {}, {.src = root});
          }
          EXPECT_SAME(input, input_of(rank, numel, dtype), "input " + what);
          EXPECT_SAME(output,
                      input_of(3 * root + rank, numel, dtype),
                      "scatter " + what);
        }
      }
    }
  });
}

/// What goes from one rank to another in an all_to_all: up to seven rows.
Tensor rows_between(int from, int to, c10::ScalarType dtype, int64_t columns) {
  const int64_t rows = (3 * from + 2 * to) % 8;
  return input_of(5 * from + to, rows * columns, dtype).view({rows, columns});
}

TEST_P(Conformance, AllToAll) {
  const int n = ranks();
  run([&](int rank) {
    for (const auto dtype : movable()) {
      for (const int64_t columns : {0, 1, 33, 4099}) {
        const std::string what = std::string(c10::toString(dtype)) + ", " +
                                 std::to_string(columns) + " columns";
        // Equal parts of a tensor.
        std::vector<Tensor> inputs;
        std::vector<Tensor> expected;
        for (int r = 0; r < n; ++r) {
          inputs.push_back(
              input_of(7 * rank + r, 2 * columns, dtype).view({2, columns}));
          expected.push_back(
              input_of(7 * r + rank, 2 * columns, dtype).view({2, columns}));
        }
        auto output = at::empty({2 * n, columns}, dtype);
        all_to_all_single(output, at::cat(inputs));
        EXPECT_SAME(output, at::cat(expected), "equal " + what);
        // Unequal ones, some of them empty.
        std::vector<Tensor> outputs;
        AllToAllSingleOptions options;
        for (int r = 0; r < n; ++r) {
          inputs[r] = rows_between(rank, r, dtype, columns);
          expected[r] = rows_between(r, rank, dtype, columns);
          outputs.push_back(at::empty_like(expected[r]));
          options.input_split_sizes.push_back(inputs[r].size(0));
          options.output_split_sizes.push_back(expected[r].size(0));
        }
        output = at::empty_like(at::cat(expected));
        all_to_all_single(output, at::cat(inputs), options);
        EXPECT_SAME(output, at::cat(expected), "unequal " + what);
        all_to_all(outputs, inputs);
        for (int r = 0; r < n; ++r) {
          EXPECT_SAME(outputs[r], expected[r], "list " + what);
        }
      }
    }
  });
}

TEST_P(Conformance, ManyElements) {
  constexpr int64_t kNumel = (1 << 20) + 3;
  run([&](int rank) {
    auto tensor = input_of(rank, kNumel, at::kFloat);
    all_reduce(tensor);
    EXPECT_SAME(tensor,
                reduced(ReduceOp::SUM, ranks(), kNumel, at::kFloat),
                "all_reduce");
    auto root = input_of(rank, kNumel, at::kFloat);
    broadcast(root, {.src = ranks() - 1});
    EXPECT_SAME(root, input_of(ranks() - 1, kNumel, at::kFloat), "broadcast");
    auto reduced_to = input_of(rank, kNumel, at::kFloat);
    reduce(reduced_to, {.dst = ranks() - 1});
    EXPECT_SAME(reduced_to,
                rank == ranks() - 1
                    ? reduced(ReduceOp::SUM, ranks(), kNumel, at::kFloat)
                    : input_of(rank, kNumel, at::kFloat),
                "reduce");
  });
}

TEST_P(Conformance, ManyElementsInOneDirection) {
  const int n = ranks();
  // No whole number of cache lines or of chunks.
  constexpr int64_t kNumel = 300'007;
  run([&](int rank) {
    for (const auto dtype : {at::kByte, at::kFloat}) {
      for (const int root : {0, n - 1}) {
        std::vector<Tensor> list;
        auto part = at::zeros({kNumel}, dtype);
        // In place at the root: its tensor is of the list.
        const auto own = input_of(rank, kNumel, dtype);
        if (rank == root) {
          for (int r = 0; r < n; ++r) list.push_back(at::zeros_like(part));
          list[root] = own;
          gather(own, list, {.dst = root});
          for (int r = 0; r < n; ++r) {
            EXPECT_SAME(list[r], input_of(r, kNumel, dtype), "gather");
            list[r] = input_of(3 * root + r, kNumel, dtype);
          }
          scatter(list[root], list, {.src = root});
          part = list[root];
        } else {
          gather(own, {.dst = root});
          scatter(part, {}, {.src = root});
        }
        EXPECT_SAME(part, input_of(3 * root + rank, kNumel, dtype), "scatter");
        auto small = input_of(rank, 5, dtype);
        all_reduce(small, {.op = ReduceOp::MAX});
        EXPECT_SAME(small, reduced(ReduceOp::MAX, n, 5, dtype), "after it");
      }
    }
    auto tensor = input_of(rank, (5 << 19) + 1, at::kFloat);
    reduce(tensor);
    if (rank == 0) {
      EXPECT_SAME(
          tensor, reduced(ReduceOp::SUM, n, (5 << 19) + 1, at::kFloat), "sum");
    }
  });
}

TEST_P(Conformance, AllRanksHoldTheSameBits) {
  std::vector<Tensor> results(ranks());
  run([&](int rank) {
    // Thirds: their sum depends on the order in which it is taken.
    auto tensor = (at::arange(1001, at::kFloat) + rank) / 3;
    all_reduce(tensor, {.op = ReduceOp::AVG});
    results[rank] = tensor;
  });
  for (const auto& result : results) EXPECT_TRUE(result.equal(results[0]));
}

TEST_P(Conformance, NonContiguousTensors) {
  const int n = ranks();
  run([&](int rank) {
    const auto matrix = [](const Tensor& flat) { return flat.view({3, 5}); };
    for (const bool async : {false, true}) {
      auto input = matrix(input_of(rank, 15, at::kFloat)).t();
      ASSERT_FALSE(input.is_contiguous());
      // The elements in the order of a transposed matrix.
      const auto transposed = [&](const Tensor& flat) {
        return matrix(flat).t();
      };
      const auto sum = transposed(reduced(ReduceOp::SUM, n, 15, at::kFloat));

      auto tensor = matrix(input_of(rank, 15, at::kFloat).clone()).t();
      all_reduce(tensor, {.async_op = async}).wait();
      EXPECT_SAME(tensor, sum, "all_reduce");

      tensor = matrix(input_of(rank, 15, at::kFloat).clone()).t();
      broadcast(tensor, {.src = n - 1, .async_op = async}).wait();
      EXPECT_SAME(
          tensor, transposed(input_of(n - 1, 15, at::kFloat)), "broadcast");

      std::vector<Tensor> outputs;
      for (int r = 0; r < n; ++r) outputs.push_back(at::zeros({3, 5}).t());
      all_gather(outputs, input, {.async_op = async}).wait();
      for (int r = 0; r < n; ++r) {
        EXPECT_SAME(
            outputs[r], transposed(input_of(r, 15, at::kFloat)), "all_gather");
      }

      auto joined = at::zeros({3, 5 * n}).t();
      all_gather_into_tensor(joined, input, {.async_op = async}).wait();
      for (int r = 0; r < n; ++r) {
        EXPECT_SAME(joined.narrow(0, 5 * r, 5),
                    transposed(input_of(r, 15, at::kFloat)),
                    "all_gather_into_tensor");
      }

      auto output = at::zeros({3, 5}).t();
      reduce_scatter(output, std::vector<Tensor>(n, input), {.async_op = async})
          .wait();
      EXPECT_SAME(output, sum, "reduce_scatter");

      output = at::zeros({3, 5}).t();
      reduce_scatter_tensor(output,
                            std::vector<Tensor>(n, input).empty()
                                ? input
                                : at::cat(std::vector<Tensor>(n, input)),
                            {.async_op = async})
          .wait();
      EXPECT_SAME(output, sum, "reduce_scatter_tensor");

      tensor = matrix(input_of(rank, 15, at::kFloat).clone()).t();
      reduce(tensor, {.dst = n - 1, .async_op = async}).wait();
      EXPECT_SAME(tensor, rank == n - 1 ? sum : input, "reduce");

      std::vector<Tensor> list;
      output = at::zeros({3, 5}).t();
      if (rank == 0) {
        for (int r = 0; r < n; ++r) list.push_back(at::zeros({3, 5}).t());
        gather(input, list, {.async_op = async}).wait();
        for (int r = 0; r < n; ++r) {
          EXPECT_SAME(
              list[r], transposed(input_of(r, 15, at::kFloat)), "gather");
        }
        scatter(output, list, {.async_op = async}).wait();
      } else {
        gather(input, {.async_op = async}).wait();
        scatter(output, {}, {.async_op = async}).wait();
      }
      EXPECT_SAME(output, input, "scatter");

      // The rows of rank r's matrix that go to this rank, for every r.
      std::vector<Tensor> rows;
      for (int r = 0; r < n; ++r) {
        rows.push_back(input_of(r, 3 * n, at::kFloat).view({3, n}).t()[rank]);
      }
      auto exchanged = at::zeros({3, n}).t();
      all_to_all_single(exchanged,
                        input_of(rank, 3 * n, at::kFloat).view({3, n}).t(),
                        {.async_op = async})
          .wait();
      EXPECT_SAME(exchanged, at::stack(rows), "all_to_all_single");
    }
  });
}

TEST_P(Conformance, ScalarsAndParameters) {
  run([&](int rank) {
    auto scalar = at::scalar_tensor(rank + 1, at::kLong);
    all_reduce(scalar, {.op = ReduceOp::MAX});
    EXPECT_EQ(scalar.item<int64_t>(), ranks());
    auto parameter = at::full({2}, rank + 1.0).requires_grad_();
    broadcast(parameter);
    EXPECT_TRUE(parameter.detach().equal(at::ones({2})));
  });
}

TEST_P(Conformance, ManyOperationsUnderWay) {
  const int n = ranks();
  run([&](int rank) {
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(input_of(rank + i, 100 + i, at::kInt));
      works.push_back(i % 2 ? all_reduce(tensors[i], {.async_op = true})
                            : broadcast(tensors[i], {.async_op = true}));
    }
    const auto own = input_of(rank, 50, at::kInt);
    std::vector<Tensor> gathered;
    for (int r = 0; rank == 0 && r < n; ++r) {
      gathered.push_back(at::zeros_like(own));
    }
    works.push_back(rank == 0 ? gather(own, gathered, {.async_op = true})
                              : gather(own, {.async_op = true}));
    auto exchanged = at::zeros({n}, at::kInt);
    works.push_back(all_to_all_single(
        exchanged, at::full({n}, rank, at::kInt), {.async_op = true}));
    works.push_back(barrier({.async_op = true}));
    for (auto& work : works) {
      work.wait();
      EXPECT_TRUE(work.is_completed());
    }
    works.front().wait();  // again: nothing happens
    for (size_t r = 0; r < gathered.size(); ++r) {
      EXPECT_SAME(
          gathered[r], input_of(static_cast<int>(r), 50, at::kInt), "gather");
    }
    EXPECT_SAME(exchanged, at::arange(n, at::kInt), "all_to_all_single");
    for (int i = 0; i < 20; ++i) {
      auto expected = input_of(i, 100 + i, at::kInt);
      for (int r = 1; i % 2 && r < n; ++r) {
        expected += input_of(r + i, 100 + i, at::kInt);
      }
      EXPECT_SAME(tensors[i], expected, "operation " + std::to_string(i));
    }
  });
}

TEST_P(Conformance, ABarrierHoldsAllRanksBack) {
  std::atomic<int> arrived{0};
  run([&](int rank) {
    std::this_thread::sleep_for(rank * 5ms);
    arrived.fetch_add(1);
    barrier();
    EXPECT_EQ(arrived.load(), ranks());
  });
}

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

TEST_P(Conformance, BoolIsReducedByMinAndMax) {
  const int n = ranks();
  run([&](int rank) {
    for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
      // Of no rank, of rank 0 alone, of all ranks.
      auto tensor = at::tensor({0, rank == 0 ? 1 : 0, 1}).to(at::kBool);
      all_reduce(tensor, {.op = op});
      const int one = op == ReduceOp::MAX || n == 1 ? 1 : 0;
      EXPECT_SAME(tensor, at::tensor({0, one, 1}).to(at::kBool), "bool");
    }
  });
}

TEST_P(Conformance, LazilyConjugatedAndNegatedTensors) {
  const int n = ranks();
  run([&](int rank) {
    const auto of_rank = [](int r) {
      return at::complex(at::full({3}, r + 1.0), at::full({3}, r + 2.0));
    };
    std::vector<Tensor> outputs;
    for (int r = 0; r < n; ++r) outputs.push_back(at::empty_like(of_rank(0)));
    all_gather(outputs, of_rank(rank).conj());
    for (int r = 0; r < n; ++r) {
      EXPECT_SAME(outputs[r], of_rank(r).conj().resolve_conj(), "conjugate");
    }
    auto negative = at::_neg_view(at::full({3}, rank + 1.0));
    all_reduce(negative);
    EXPECT_SAME(negative, at::full({3}, -n * (n + 1) / 2.0), "negative");
  });
}

TEST_P(Conformance, AWaitThatIsTooShortHarmsNothing) {
  const int n = ranks();
  std::atomic<int> waited{0};
  run([&](int rank) {
    if (rank == 0 && n > 1) {
      const auto work = barrier({.async_op = true});
      for (const auto limit : {0ms, -1ms, 1ms}) {
        expect_error<TimeoutError>([&] { work.wait(limit); }, "barrier");
      }
      EXPECT_FALSE(work.is_completed());
      waited = 1;
      work.wait();
      work.wait(0ms);
    } else {
      while (n > 1 && waited == 0) std::this_thread::sleep_for(1ms);
      barrier();
    }
    auto tensor = input_of(rank, 4, at::kFloat);
    all_reduce(tensor);
    EXPECT_SAME(tensor, reduced(ReduceOp::SUM, n, 4, at::kFloat), "afterwards");
  });
}

TEST_P(Conformance, ARankMayLeaveAsSoonAsItHasJoined) {
  run([](int) {});
}

TEST_P(Conformance, ARankMayFailAsSoonAsItHasJoined) {
  const auto start = Clock::now();
  try {
    run([&](int rank) {
      if (rank == 0) throw std::runtime_error("no more coffee");
      barrier();
    });
    ADD_FAILURE() << "run_ranks swallowed the error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "no more coffee");
  }
  // The others learnt of it.
  EXPECT_LT(Clock::now() - start, 30s);
}

TEST_P(Conformance, TheLongestTimeoutIsNotThePast) {
  run([](int) { barrier(); }, std::chrono::milliseconds::max());
}

TEST_P(Conformance, WrongArgumentsAreRefusedAndTheGroupStaysUsable) {
  const int n = ranks();
  run([&](int rank) {
    Tensor undefined;
    auto good = at::ones({4});
    auto meta = at::ones({4}, at::TensorOptions().device(at::kMeta));
    auto expanded = at::ones({1}).expand({4});
    auto boolean = at::ones({4}, at::kBool);
    auto complex = at::ones({4}, at::kComplexFloat);
    auto sparse = at::ones({4}).to_sparse();
    auto longer = at::ones({4 * n + 1});
    auto other = at::ones({4 * n}, at::kDouble);
    std::vector<Tensor> too_many(n + 1, good);
    std::vector<Tensor> other_shape(n, at::ones({2, 2}));

    expect_error<InvalidArgument>([&] { all_reduce(undefined); }, "undefined");
    expect_error<InvalidArgument>([&] { all_reduce(meta); }, "meta");
    expect_error<InvalidArgument>([&] { all_reduce(expanded); }, "clone()");
    expect_error<InvalidArgument>([&] { all_reduce(sparse); }, "to_dense()");
    expect_error<Unsupported>([&] { all_reduce(boolean); }, "Bool");
    expect_error<Unsupported>([&] { all_reduce(complex); }, "ComplexFloat");
    expect_error<InvalidArgument>([&] { broadcast(good, {.src = n}); }, "src");
    expect_error<InvalidArgument>([&] { broadcast(good, {.src = -1}); }, "src");
    expect_error<InvalidArgument>([&] { all_gather(too_many, good); },
                                  "one per rank");
    expect_error<InvalidArgument>([&] { all_gather(other_shape, good); },
                                  "outputs[0] has shape [2, 2]");
    expect_error<InvalidArgument>([&] { all_gather_into_tensor(longer, good); },
                                  "are needed");
    expect_error<InvalidArgument>([&] { all_gather_into_tensor(other, good); },
                                  "dtype");
    expect_error<InvalidArgument>([&] { reduce_scatter(good, too_many); },
                                  "one per rank");
    expect_error<InvalidArgument>([&] { reduce_scatter_tensor(good, longer); },
                                  "are needed");
    expect_error<InvalidArgument>([&] { reduce(good, {.dst = n}); }, "dst");
    expect_error<Unsupported>([&] { reduce(complex); }, "ComplexFloat");
    expect_error<InvalidArgument>([&] { gather(good, {.dst = -1}); }, "dst");
    expect_error<InvalidArgument>(
        [&] { gather(good, too_many, {.dst = rank}); }, "one per rank");
    expect_error<InvalidArgument>([&] { gather(good, {.dst = rank}); },
                                  "one per rank");
    expect_error<InvalidArgument>(
        [&] { scatter(good, other_shape, {.src = rank}); },
        "scatter_list[0] has shape [2, 2]");
    if (n > 1) {
      expect_error<InvalidArgument>(
          [&] { scatter(good, too_many, {.src = (rank + 1) % n}); },
          "for the root alone");
    }
    expect_error<InvalidArgument>([&] { all_to_all(too_many, too_many); },
                                  "one per rank");
    auto rows = at::ones({4 * n});
    expect_error<InvalidArgument>([&] { all_to_all_single(other, rows); },
                                  "dtype");
    if (n > 1) {
      expect_error<InvalidArgument>([&] { all_to_all_single(longer, rows); },
                                    "do not divide equally");
    }
    const std::vector<int64_t> equal(n, 4);
    auto negative = equal;
    negative[0] = 4 * n + 4;
    negative.back() = n > 1 ? -4 : -1;
    auto output = at::empty({4 * n});
    const auto refuses = [&](std::vector<int64_t> output_splits,
                             std::vector<int64_t> input_splits,
                             const char* part) {
      expect_error<InvalidArgument>(
          [&] {
            all_to_all_single(output,
                              rows,
                              {.output_split_sizes = std::move(output_splits),
                               .input_split_sizes = std::move(input_splits)});
          },
          part);
    };
    refuses({}, std::vector<int64_t>(n + 1, 4), "one for each of");
    refuses(std::vector<int64_t>(n, 5), equal, "add up to");
    refuses(negative, equal, "a negative number");
    refuses(std::vector<int64_t>(n, int64_t{1} << 62), equal, "add up to more");
    expect_error<InvalidArgument>([&] { all_to_all_single(rows, rows); },
                                  "shares memory");
    std::vector<Tensor> one_list(n, good);
    expect_error<InvalidArgument>([&] { all_to_all(one_list, one_list); },
                                  "shares memory");
    auto scalar = at::ones({});
    expect_error<InvalidArgument>(
        [&] { all_to_all_single(scalar, at::ones({})); }, "not a scalar");
    expect_error<Unsupported>(
        [&] { reduce_scatter(boolean, std::vector<Tensor>(n, boolean)); },
        "Bool");

    auto tensor = input_of(rank, 4, at::kFloat);
    all_reduce(tensor);
    EXPECT_SAME(tensor, reduced(ReduceOp::SUM, n, 4, at::kFloat), "afterwards");
  });
}

TEST(ConformanceWithoutGroup, EveryCollectiveSaysWhatToCall) {
  auto tensor = at::ones({2});
  std::vector<Tensor> list = {tensor};
  const std::string part = "call init_process_group first";
  expect_error<InvalidArgument>([&] { all_reduce(tensor); }, part);
  expect_error<InvalidArgument>([&] { broadcast(tensor); }, part);
  expect_error<InvalidArgument>([&] { all_gather(list, tensor); }, part);
  expect_error<InvalidArgument>([&] { all_gather_into_tensor(tensor, tensor); },
                                part);
  expect_error<InvalidArgument>([&] { reduce_scatter(tensor, list); }, part);
  expect_error<InvalidArgument>([&] { reduce_scatter_tensor(tensor, tensor); },
                                part);
  expect_error<InvalidArgument>([&] { reduce(tensor); }, part);
  expect_error<InvalidArgument>([&] { gather(tensor, list); }, part);
  expect_error<InvalidArgument>([&] { gather(tensor); }, part);
  expect_error<InvalidArgument>([&] { scatter(tensor, list); }, part);
  expect_error<InvalidArgument>([&] { scatter(tensor); }, part);
  expect_error<InvalidArgument>([&] { all_to_all(list, list); }, part);
  expect_error<InvalidArgument>([&] { all_to_all_single(tensor, tensor); },
                                part);
  expect_error<InvalidArgument>([&] { barrier(); }, part);
}

/// Ranks that disagree: everyone gets the error.
class ConformanceErrors : public Conformance {
 protected:
  template <class E>
  void expect_on_all(const std::function<void(int rank)>& call) const {
    std::atomic<int> errors{0};
    run([&](int rank) {
      try {
        call(rank);
        ADD_FAILURE() << "no error on rank " << rank;
      } catch (const E&) {
        errors.fetch_add(1);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "another error on rank " << rank << ": " << e.what();
      }
    });
    EXPECT_EQ(errors.load(), ranks());
  }
};

INSTANTIATE_TEST_SUITE_P(Backends,
                         ConformanceErrors,
                         ::testing::Combine(::testing::ValuesIn(backends()),
                                            ::testing::Values(2, 3)),
                         name_of);

TEST_P(ConformanceErrors, DifferentShapes) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({rank == 1 ? 5 : 4});
    all_reduce(tensor);
  });
}

TEST_P(ConformanceErrors, DifferentDtypes) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4}, rank == 1 ? at::kInt : at::kFloat);
    all_reduce(tensor);
  });
}

TEST_P(ConformanceErrors, DifferentReductions) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    all_reduce(tensor, {.op = rank == 1 ? ReduceOp::MAX : ReduceOp::SUM});
  });
}

TEST_P(ConformanceErrors, DifferentOperations) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    if (rank == 1) {
      broadcast(tensor);
    } else {
      all_reduce(tensor);
    }
  });
}

TEST_P(ConformanceErrors, DifferentRoots) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    broadcast(tensor, {.src = rank == 1 ? 1 : 0});
  });
}

TEST_P(ConformanceErrors, DifferentDestinations) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    reduce(tensor, {.dst = rank == 1 ? 1 : 0});
  });
}

TEST_P(ConformanceErrors, DifferentSources) {
  expect_on_all<MismatchError>([&](int rank) {
    auto tensor = at::ones({4});
    const int src = rank == 1 ? 1 : 0;
    scatter(tensor,
            rank == src ? std::vector<Tensor>(ranks(), at::ones({4}))
                        : std::vector<Tensor>(),
            {.src = src});
  });
}

TEST_P(ConformanceErrors, DifferentShapesOfAGather) {
  expect_on_all<MismatchError>([&](int rank) {
    const auto tensor = at::ones({rank == 1 ? 5 : 4});
    std::vector<Tensor> list;
    for (int r = 0; rank == 0 && r < ranks(); ++r) {
      list.push_back(at::ones({4}));
    }
    gather(tensor, list);
  });
}

TEST_P(ConformanceErrors, DifferentSplits) {
  expect_on_all<MismatchError>([&](int rank) {
    // Rank 1 sends rank 0 a row that it does not expect.
    std::vector<Tensor> inputs(ranks(), at::ones({2, 3}));
    std::vector<Tensor> outputs;
    for (int r = 0; r < ranks(); ++r) outputs.push_back(at::ones({2, 3}));
    if (rank == 1) inputs[0] = at::ones({3, 3});
    try {
      all_to_all(outputs, inputs);
    } catch (const MismatchError& e) {
      EXPECT_NE(std::string(e.what()).find("rank 1 sends 9 elements to rank 0, "
                                           "which expects 6"),
                std::string::npos)
          << e.what();
      throw;
    }
  });
}

TEST_P(ConformanceErrors, AfterAMismatchTheGroupRefuses) {
  expect_on_all<Error>([](int rank) {
    auto tensor = at::ones({rank == 1 ? 5 : 4});
    try {
      all_reduce(tensor);
    } catch (const MismatchError&) {
      barrier();
    }
  });
}

TEST_P(ConformanceErrors, ALateRankIsNamedAtTheDeadline) {
  // Joining has the same bound, so it is not a short one.
  constexpr auto kTimeout = 2s;
  run(
      [&](int rank) {
        if (rank == 1) {
          std::this_thread::sleep_for(2 * kTimeout);
          return;
        }
        const auto start = Clock::now();
        auto tensor = at::ones({4});
        try {
          all_reduce(tensor);
          ADD_FAILURE() << "no error";
        } catch (const TimeoutError& e) {
          EXPECT_EQ(e.context().operation, "all_reduce");
          EXPECT_EQ(e.context().peers, std::vector<int>{1}) << e.what();
        }
        EXPECT_LE(Clock::now() - start, kTimeout + 1s);
      },
      kTimeout);
}

TEST_P(ConformanceErrors, AFailedRankIsNamedByTheOthers) {
  std::atomic<int> lost{0};
  try {
    run([&](int rank) {
      if (rank == 1) {
        barrier();  // all have joined
        throw std::runtime_error("no more coffee");
      }
      auto tensor = at::ones({4});
      try {
        barrier();
        for (;;) all_reduce(tensor);
      } catch (const PeerLost& e) {
        EXPECT_EQ(e.context().peers, std::vector<int>{1}) << e.what();
        EXPECT_NE(std::string(e.what()).find("no more coffee"),
                  std::string::npos)
            << e.what();
        lost.fetch_add(1);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "another error: " << e.what();
      }
    });
    ADD_FAILURE() << "run_ranks swallowed the error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "no more coffee");
  }
  EXPECT_EQ(lost.load(), ranks() - 1);
}

TEST_P(ConformanceErrors, ARankThatLeftIsNamedByTheOthers) {
  run([&](int rank) {
    try {
      barrier();  // all have joined
      if (rank == 1) return;
      barrier();
      ADD_FAILURE() << "no error";
    } catch (const PeerLost& e) {
      EXPECT_EQ(e.context().peers, std::vector<int>{1}) << e.what();
    } catch (const std::exception& e) {
      ADD_FAILURE() << "another error: " << e.what();
    }
  });
}

}  // namespace
}  // namespace lockstep
