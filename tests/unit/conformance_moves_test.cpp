#include "unit/conformance.h"

namespace lockstep {
namespace {

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

}  // namespace
}  // namespace lockstep
