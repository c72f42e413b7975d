#include "unit/conformance.h"

namespace lockstep {
namespace {

INSTANTIATE_TEST_SUITE_P(Backends,
                         Conformance,
                         ::testing::ValuesIn(cases({1, 2, 3, 5})),
                         name_of);

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

TEST_P(Conformance, AllRanksHoldTheSameBits) {
  run([&](int rank) {
    // Thirds: their sum depends on the order in which it is taken.
    const auto input = [](int r) {
      return (at::arange(1001, at::kFloat) + r) / 3;
    };
    auto expected = at::zeros({1001});
    for (int first = 0; first < ranks(); first += ranks_per_host()) {
      auto of_host = input(first);
      for (int r = 1; r < ranks_per_host(); ++r) of_host += input(first + r);
      expected += of_host / ranks_per_host();
    }
    expected /= ranks() / ranks_per_host();
    auto tensor = input(rank);
    all_reduce(tensor, {.op = ReduceOp::AVG});
    EXPECT_SAME(tensor, expected, "in the order of the ranks");
    std::vector<Tensor> results(ranks());
    for (auto& result : results) result = at::empty_like(tensor);
    all_gather(results, tensor);
    for (const auto& result : results) EXPECT_SAME(result, tensor, "bits");
  });
}

}  // namespace
}  // namespace lockstep
