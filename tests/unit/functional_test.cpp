// Differentiable collectives. What each gives, and its gradients, are compared
// with autograd over the same work in one process: there all ranks' tensors are
// at hand, and the collective is a sum, a copy or a cat.

#include "lockstep/distributed/functional.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/testing/run_ranks.h"
#include "support/thread_backends.h"

namespace lockstep {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

/// Rank r's tensors.
Tensors inputs_of(int rank, size_t number, const std::vector<int64_t>& shape) {
  Tensors inputs;
  for (size_t i = 0; i < number; ++i) {
    const auto numel = c10::multiply_integers(shape);
    inputs.push_back(((torch::arange(numel, torch::kDouble) * 5 + rank * 3 +
                       static_cast<int64_t>(i) * 7) %
                          11 -
                      4)
                         .view(shape)
                         .requires_grad_());
  }
  return inputs;
}

/// A loss that weighs every element of every output of a rank differently. Of
/// third order, so that second derivatives matter.
Tensor loss_of(int rank, const Tensors& outputs) {
  auto loss = torch::zeros({}, torch::kDouble);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto weights = (torch::arange(outputs[i].numel(), torch::kDouble) +
                          rank + static_cast<int64_t>(i)) %
                             5 +
                         1;
    loss = loss + (outputs[i].reshape(-1).pow(3) * weights).sum();
  }
  return loss;
}

/// One collective: what a rank does, and what all ranks get, from all inputs.
struct Case {
  size_t inputs;
  std::vector<int64_t> shape;
  std::function<Tensors(const Tensors& own)> collective;
  std::function<std::vector<Tensors>(const std::vector<Tensors>& all)> model;
};

class Functional
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] int ranks() const { return std::get<1>(GetParam()); }

  void run(const std::function<void(int rank)>& fn) const {
    testing::run_ranks(ranks(), fn, {.backend = std::get<0>(GetParam())});
  }

  /// Compares values, gradients and gradients of a function of the gradients.
  void check(const Case& c) const {
    std::vector<Tensors> all;
    for (int r = 0; r < ranks(); ++r) {
      all.push_back(inputs_of(r, c.inputs, c.shape));
    }
    const auto expected = c.model(all);
    auto total = torch::zeros({}, torch::kDouble);
    Tensors leaves;
    for (int r = 0; r < ranks(); ++r) {
      total = total + loss_of(r, expected[static_cast<size_t>(r)]);
      for (const auto& input : all[static_cast<size_t>(r)]) {
        leaves.push_back(input);
      }
    }
    const auto first = torch::autograd::grad({total}, leaves, {}, true, true);
    auto sum = torch::zeros({}, torch::kDouble);
    for (const auto& gradient : first) sum = sum + gradient.pow(2).sum();
    const auto second = torch::autograd::grad({sum}, leaves);

    run([&](int rank) {
      const auto own = inputs_of(rank, c.inputs, c.shape);
      const auto outputs = c.collective(own);
      const auto& wanted = expected[static_cast<size_t>(rank)];
      ASSERT_EQ(outputs.size(), wanted.size());
      for (size_t i = 0; i < outputs.size(); ++i) {
        EXPECT_TRUE(outputs[i].equal(wanted[i])) << outputs[i] << wanted[i];
      }
      for (const auto& input : own) {
        EXPECT_TRUE(input.is_leaf() &&
                    input.equal(inputs_of(
                        rank,
                        c.inputs,
                        c.shape)[static_cast<size_t>(&input - own.data())]));
      }
      const auto gradients =
          torch::autograd::grad({loss_of(rank, outputs)}, own, {}, true, true);
      auto own_sum = torch::zeros({}, torch::kDouble);
      for (const auto& gradient : gradients) {
        own_sum = own_sum + gradient.pow(2).sum();
      }
      const auto again = torch::autograd::grad({own_sum}, own);
      for (size_t i = 0; i < own.size(); ++i) {
        const auto leaf = static_cast<size_t>(rank) * c.inputs + i;
        EXPECT_TRUE(gradients[i].allclose(first[leaf]))
            << "gradient " << gradients[i] << first[leaf];
        EXPECT_TRUE(again[i].allclose(second[leaf]))
            << "second " << again[i] << second[leaf];
      }
    });
  }

  /// Of the ranks' first tensors.
  [[nodiscard]] Tensor sum(const std::vector<Tensors>& all,
                           size_t index = 0) const {
    auto result = all[0][index];
    for (size_t r = 1; r < all.size(); ++r) result = result + all[r][index];
    return result;
  }

  [[nodiscard]] size_t count() const { return static_cast<size_t>(ranks()); }
  [[nodiscard]] int last() const { return ranks() - 1; }
};

INSTANTIATE_TEST_SUITE_P(
    Backends,
    Functional,
    ::testing::Combine(::testing::ValuesIn(thread_backends()),
                       ::testing::Values(1, 2, 3)),
    [](const auto& parameter) {
      return std::get<0>(parameter.param) + "_" +
             std::to_string(std::get<1>(parameter.param));
    });

TEST_P(Functional, AllReduce) {
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
    check({.inputs = 1,
           .shape = {2, 3},
           .collective = [&](const Tensors& own) -> Tensors {
             return {functional::all_reduce(own[0], {.op = op})};
           },
           .model =
               [&](const std::vector<Tensors>& all) {
                 auto result = sum(all);
                 if (op == ReduceOp::AVG) result = result / ranks();
                 return std::vector<Tensors>(count(), Tensors{result});
               }});
  }
}

TEST_P(Functional, Broadcast) {
  check({.inputs = 1,
         .shape = {2, 3},
         .collective = [&](const Tensors& own) -> Tensors {
           return {functional::broadcast(own[0], {.src = last()})};
         },
         .model =
             [&](const std::vector<Tensors>& all) {
               // The others' tensors take part with gradient zero.
               return std::vector<Tensors>(
                   count(), Tensors{all.back()[0] + (sum(all) - sum(all))});
             }});
}

TEST_P(Functional, Reduce) {
  check({.inputs = 1,
         .shape = {2, 3},
         .collective = [&](const Tensors& own) -> Tensors {
           const auto result = functional::reduce(own[0], {.dst = last()});
           if (get_rank() == last()) return {result};
           return {result * 0};  // what is no result is no part of the loss
         },
         .model =
             [&](const std::vector<Tensors>& all) {
               std::vector<Tensors> outputs(count(), {all[0][0] * 0});
               outputs.back() = {sum(all)};
               return outputs;
             }});
}

TEST_P(Functional, AllGather) {
  check({.inputs = 1,
         .shape = {2, 3},
         .collective =
             [](const Tensors& own) { return functional::all_gather(own[0]); },
         .model =
             [&](const std::vector<Tensors>& all) {
               Tensors every;
               for (const auto& own : all) every.push_back(own[0]);
               return std::vector<Tensors>(count(), every);
             }});
}

TEST_P(Functional, AllGatherIntoTensor) {
  check({.inputs = 1,
         .shape = {2, 3},
         .collective = [](const Tensors& own) -> Tensors {
           return {functional::all_gather_into_tensor(own[0])};
         },
         .model =
             [&](const std::vector<Tensors>& all) {
               Tensors every;
               for (const auto& own : all) every.push_back(own[0]);
               return std::vector<Tensors>(count(), Tensors{torch::cat(every)});
             }});
}

TEST_P(Functional, ReduceScatter) {
  for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
    check({.inputs = count(),
           .shape = {2, 3},
           .collective = [&](const Tensors& own) -> Tensors {
             return {functional::reduce_scatter(own, {.op = op})};
           },
           .model =
               [&](const std::vector<Tensors>& all) {
                 std::vector<Tensors> outputs;
                 for (size_t r = 0; r < count(); ++r) {
                   const auto result = sum(all, r);
                   outputs.push_back(
                       {op == ReduceOp::AVG ? result / ranks() : result});
                 }
                 return outputs;
               }});
  }
}

TEST_P(Functional, ReduceScatterTensor) {
  check({.inputs = 1,
         .shape = {2 * ranks(), 3},
         .collective = [](const Tensors& own) -> Tensors {
           return {functional::reduce_scatter_tensor(own[0])};
         },
         .model =
             [&](const std::vector<Tensors>& all) {
               std::vector<Tensors> outputs;
               for (const auto& part : sum(all).chunk(ranks())) {
                 outputs.push_back({part});
               }
               return outputs;
             }});
}

TEST_P(Functional, Gather) {
  check({.inputs = 1,
         .shape = {2, 3},
         .collective =
             [&](const Tensors& own) {
               return functional::gather(own[0], {.dst = last()});
             },
         .model =
             [&](const std::vector<Tensors>& all) {
               Tensors every;
               for (const auto& own : all) every.push_back(own[0]);
               std::vector<Tensors> outputs(
                   count(),
                   Tensors(count(), torch::zeros({2, 3}, torch::kDouble)));
               outputs.back() = every;
               return outputs;
             }});
}

TEST_P(Functional, Scatter) {
  check({.inputs = count(),
         .shape = {2, 3},
         .collective = [&](const Tensors& own) -> Tensors {
           return {functional::scatter(own, {.src = last()})};
         },
         .model =
             [&](const std::vector<Tensors>& all) {
               std::vector<Tensors> outputs;
               for (size_t r = 0; r < count(); ++r) {
                 const auto unused = sum(all, r) - sum(all, r);
                 outputs.push_back({all.back()[r] + unused});
               }
               return outputs;
             }});
}

TEST_P(Functional, AllToAll) {
  check(
      {.inputs = count(),
       .shape = {2, 3},
       .collective =
           [](const Tensors& own) { return functional::all_to_all(own, own); },
       .model =
           [&](const std::vector<Tensors>& all) {
             std::vector<Tensors> outputs(count());
             for (size_t to = 0; to < count(); ++to) {
               for (const auto& own : all) outputs[to].push_back(own[to]);
             }
             return outputs;
           }});
}

/// Rank r sends `to` + 1 rows to rank `to`, and so gets r + 1 from each.
TEST_P(Functional, AllToAllSingleOfUnequalRows) {
  std::vector<int64_t> sends;
  int64_t rows = 0;
  for (int to = 0; to < ranks(); ++to) {
    sends.push_back(to + 1);
    rows += to + 1;
  }
  check({.inputs = 1,
         .shape = {rows, 2},
         .collective = [&](const Tensors& own) -> Tensors {
           const std::vector<int64_t> receives(count(), get_rank() + 1);
           return {functional::all_to_all_single(
               own[0],
               {.output_split_sizes = receives, .input_split_sizes = sends})};
         },
         .model =
             [&](const std::vector<Tensors>& all) {
               std::vector<Tensors> outputs;
               int64_t start = 0;
               for (int to = 0; to < ranks(); ++to) {
                 Tensors parts;
                 for (const auto& own : all) {
                   parts.push_back(own[0].narrow(0, start, to + 1));
                 }
                 outputs.push_back({torch::cat(parts)});
                 start += to + 1;
               }
               return outputs;
             }});
}

TEST_P(Functional, InAGroupOfSomeRanks) {
  if (ranks() < 2) return;  // there is no pair
  run([&](int rank) {
    const auto pair = new_group({0, last()});
    const auto x = torch::full({2}, rank + 1., torch::requires_grad());
    if (!pair.is_member()) {
      EXPECT_THROW((void)functional::all_reduce(x, {.group = pair}),
                   InvalidArgument);
      return;
    }
    const auto y = functional::all_reduce(x, {.group = pair});
    EXPECT_TRUE(y.equal(torch::full({2}, 1. + ranks())));
    (y * (rank + 1)).sum().backward();
    EXPECT_TRUE(x.grad().equal(torch::full({2}, 1. + ranks())));
  });
}

TEST_P(Functional, WithoutAGradientNothingIsRecorded) {
  run([&](int) {
    const auto plain = torch::ones({2});
    EXPECT_FALSE(functional::all_reduce(plain).requires_grad());
    const auto x = torch::ones({2}, torch::requires_grad());
    {
      const torch::NoGradGuard no_grad;
      EXPECT_FALSE(functional::all_reduce(x).requires_grad());
    }
    EXPECT_TRUE(functional::all_reduce(plain, {.op = ReduceOp::MAX})
                    .equal(torch::ones({2})));
  });
}

TEST_P(Functional, WrongArguments) {
  run([&](int) {
    const auto x = torch::ones({2}, torch::requires_grad());
    EXPECT_THROW((void)functional::all_reduce(x, {.op = ReduceOp::MAX}),
                 Unsupported);
    EXPECT_THROW((void)functional::all_reduce(x, {.async_op = true}),
                 InvalidArgument);
    EXPECT_THROW((void)functional::scatter({}), InvalidArgument);
    const Tensors too_many(static_cast<size_t>(ranks()) + 1, x);
    EXPECT_THROW((void)functional::scatter(too_many), InvalidArgument);
    EXPECT_THROW((void)functional::broadcast(Tensor()), InvalidArgument);
    EXPECT_THROW((void)functional::all_to_all({x}, {Tensor()}),
                 InvalidArgument);
    EXPECT_THROW((void)functional::reduce_scatter({}), InvalidArgument);
    EXPECT_THROW((void)functional::reduce_scatter_tensor(torch::tensor(1.)),
                 InvalidArgument);
    EXPECT_THROW((void)functional::all_to_all_single(torch::tensor(1.)),
                 InvalidArgument);
  });
}

}  // namespace
}  // namespace lockstep
