#include "unit/conformance.h"

#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace lockstep {
namespace {

using namespace std::chrono_literals;

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
  run([&](int rank) {
    const auto now = [] {
      return at::tensor(Clock::now().time_since_epoch().count());
    };
    std::this_thread::sleep_for(rank * 5ms);
    auto last_arrival = now();
    barrier();
    auto first_departure = now();
    all_reduce(last_arrival, {.op = ReduceOp::MAX});
    all_reduce(first_departure, {.op = ReduceOp::MIN});
    EXPECT_LE(last_arrival.item<int64_t>(), first_departure.item<int64_t>());
  });
}

TEST_P(Conformance, AWaitThatIsTooShortHarmsNothing) {
  const int n = ranks();
  run([&](int rank) {
    const auto store = get_group()->getStore();
    if (rank == 0 && n > 1) {
      const auto work = barrier({.async_op = true});
      for (const auto limit : {0ms, -1ms, 1ms}) {
        expect_error<TimeoutError>([&] { work.wait(limit); }, "barrier");
      }
      EXPECT_FALSE(work.is_completed());
      store->set("waited", "");
      work.wait();
      work.wait(0ms);
    } else {
      if (n > 1) store->wait({"waited"});
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
  // Rank 0 has its own error, and the others that of rank 0.
  expect_error<std::runtime_error>(
      [&] {
        run([&](int rank) {
          if (rank == 0) throw std::runtime_error("no more coffee");
          barrier();
        });
      },
      "no more coffee");
  EXPECT_LT(Clock::now() - start, 30s);
}

TEST_P(Conformance, TheLongestTimeoutIsNotThePast) {
  run([](int) { barrier(); }, std::chrono::milliseconds::max());
}

}  // namespace
}  // namespace lockstep
