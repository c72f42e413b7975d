#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/point_to_point.h"
#include "lockstep/distributed/process_group.h"
#include "support/multiprocess.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

at::Tensor values(int rank, int64_t numel, c10::ScalarType dtype) {
  return (torch::arange(numel) + rank).remainder(3).add(1).to(dtype);
}

at::Tensor reduced(ReduceOp op, int64_t numel, c10::ScalarType dtype) {
  const auto a = values(0, numel, at::kLong);
  const auto b = values(1, numel, at::kLong);
  switch (op) {
    case ReduceOp::SUM:
      return (a + b).to(dtype);
    case ReduceOp::AVG:
      return (a + b).to(dtype) / 2;
    case ReduceOp::PRODUCT:
      return (a * b).to(dtype);
    case ReduceOp::MIN:
      return at::minimum(a, b).to(dtype);
    case ReduceOp::MAX:
      return at::maximum(a, b).to(dtype);
  }
  throw std::logic_error("op");
}

void check(const char* what,
           const at::Tensor& actual,
           const at::Tensor& expected) {
  if (!actual.equal(expected)) throw std::runtime_error(what);
}

void check_reductions(int rank) {
  for (const auto dtype : {at::kByte,
                           at::kChar,
                           at::kInt,
                           at::kLong,
                           at::kHalf,
                           at::kBFloat16,
                           at::kFloat,
                           at::kDouble}) {
    std::vector<ReduceOp> ops = {
        ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX};
    if (at::isFloatingType(dtype)) ops.push_back(ReduceOp::AVG);
    for (const auto op : ops) {
      for (const int64_t numel : {1, 5, 30000}) {
        auto tensor = values(rank, numel, dtype);
        all_reduce(tensor, {.op = op});
        check("all_reduce", tensor, reduced(op, numel, dtype));
      }
    }
  }
}

// Rank 0 is the first to send.
void check_messages(int rank) {
  const int peer = 1 - rank;
  for (const auto dtype : {at::kFloat, at::kLong, at::kComplexFloat}) {
    for (const int64_t numel : {1, 1000, 300000}) {
      const auto own = values(rank, numel, dtype);
      auto to = at::zeros({numel}, dtype);
      if (rank == 0) send(own, {.dst = peer, .tag = 5});
      if (recv(to, {.src = peer, .tag = 5}) != peer) {
        throw std::runtime_error("source");
      }
      if (rank == 1) send(own, {.dst = peer, .tag = 5});
      check("recv", to, values(peer, numel, dtype));
    }
  }
  // Tags in opposite orders, and from any rank.
  std::vector<Work> works;
  for (const int tag : {1, 2}) {
    works.push_back(
        isend(values(rank + tag, 50, at::kFloat), {.dst = peer, .tag = tag}));
  }
  auto second = torch::empty(50);
  auto first = torch::empty(50);
  irecv(second, {.src = peer, .tag = 2}).wait();
  const auto any = irecv(first, {.tag = 1});
  any.wait();
  if (any.source_rank() != peer) throw std::runtime_error("any source");
  for (const auto& work : works) work.wait();
  check("tag 1", first, values(peer + 1, 50, at::kFloat));
  check("tag 2", second, values(peer + 2, 50, at::kFloat));
  auto batched = torch::empty(9);
  for (const auto& work :
       batch_isend_irecv({P2POp(isend, values(rank, 9, at::kFloat), peer),
                          P2POp(irecv, batched, peer)})) {
    work.wait();
  }
  check("batch_isend_irecv", batched, values(peer, 9, at::kFloat));
}

// In the order of collectives.py.
LOCKSTEP_PROCESS(collectives) {
  if (std::getenv("LOCKSTEP_INTEROP") != nullptr) {
    init_process_group();
  } else {
    init_process_group({.interop = true});
  }
  const int rank = get_rank();
  const int size = get_world_size();
  check_reductions(rank);

  for (int root = 0; root < size; ++root) {
    auto tensor = values(rank, 7, at::kFloat);
    broadcast(tensor, {.src = root});
    check("broadcast", tensor, values(root, 7, at::kFloat));
  }

  barrier();

  const auto own = values(rank, 6, at::kDouble);
  std::vector<at::Tensor> outputs = {at::empty_like(own), at::empty_like(own)};
  all_gather(outputs, own);
  for (int r = 0; r < size; ++r) {
    check("all_gather", outputs[r], values(r, 6, at::kDouble));
  }

  auto gathered = torch::empty(12, at::kDouble);
  all_gather_into_tensor(gathered, own);
  check("all_gather_into_tensor", gathered, torch::cat(outputs));

  const auto whole = values(rank, 8, at::kFloat);
  const auto expected =
      reduced(ReduceOp::SUM, 8, at::kFloat).slice(0, 4 * rank, 4 * rank + 4);
  auto output = torch::empty(4);
  reduce_scatter(output, whole.chunk(2));
  check("reduce_scatter", output, expected);

  output = torch::empty(4);
  reduce_scatter_tensor(output, whole);
  check("reduce_scatter_tensor", output, expected);

  for (int root = 0; root < size; ++root) {
    auto sum = values(rank, 9, at::kFloat);
    reduce(sum, {.dst = root});
    if (rank != root) check("elsewhere", sum, values(rank, 9, at::kFloat));
    if (rank == root)
      check("reduce", sum, reduced(ReduceOp::SUM, 9, at::kFloat));

    std::vector<at::Tensor> list;
    auto part = torch::empty(6, at::kDouble);
    if (rank == root) {
      list = {torch::empty_like(own), torch::empty_like(own)};
      gather(own, list, {.dst = root});
      for (int r = 0; r < size; ++r) {
        check("gather", list[r], values(r, 6, at::kDouble));
      }
      scatter(part, list, {.src = root});
    } else {
      gather(own, {.dst = root});
      scatter(part, {}, {.src = root});
    }
    check("scatter", part, own);
  }

  // Rank 0 sends 1 and 3 rows, rank 1 sends 2 and 4.
  const std::vector<int64_t> given = {rank + 1, rank + 3};
  const int64_t first = 1 + 2 * rank;
  auto exchanged = torch::empty({2 * first + 1, 2});
  all_to_all_single(
      exchanged,
      values(rank, 2 * (given[0] + given[1]), at::kFloat).view({-1, 2}),
      {.output_split_sizes = {first, first + 1}, .input_split_sizes = given});
  const auto rows_of = [&](int from) {
    const auto all = values(from, 2 * (2 * from + 4), at::kFloat).view({-1, 2});
    return rank == 0 ? all.slice(0, 0, from + 1) : all.slice(0, from + 1);
  };
  check("all_to_all_single", exchanged, torch::cat({rows_of(0), rows_of(1)}));

  check_messages(rank);

  auto tensor = values(rank, 1000, at::kFloat);
  all_reduce(tensor, {.async_op = true}).wait();
  check("async", tensor, reduced(ReduceOp::SUM, 1000, at::kFloat));

  barrier();
  destroy_process_group();
  std::puts("passed");
  return 0;
}

class GlooWithPython : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(CppRank, GlooWithPython, testing::Values(0, 1));

TEST_P(GlooWithPython, AllCollectives) {
  const test::Command python = {
      .argv = {std::getenv("LOCKSTEP_PYTHON"),
               std::string(std::getenv("LOCKSTEP_PYTHON_SCRIPTS")) +
                   "/collectives.py"}};
  std::vector<test::Command> commands(2, python);
  commands[GetParam()] = test::at_entry("collectives");
  test::Ranks ranks(std::move(commands));
  for (const auto& result : ranks.wait(90s)) {
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(result.out, "passed\n") << result;
  }
}

}  // namespace
}  // namespace lockstep
