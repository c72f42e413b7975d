// One rank of the benchmark `collectives`. Reads lines "OPERATION BYTES COUNT"
// and answers {"seconds": per operation, "correct": whether a result was
// right}. BYTES is what the longer one of input and output has.

#include "lockstep/distributed/collectives.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/distributed/point_to_point.h"
#include "lockstep/distributed/process_group.h"

namespace {

constexpr int kRoot = 0;

/// Rank r's input; element i is i % 1000 + r.
at::Tensor input_of(int rank, int64_t elements) {
  return at::arange(elements, at::kFloat).remainder(1000) + rank;
}

at::Tensor sum_of_inputs(int64_t elements) {
  auto sum = at::zeros({elements});
  for (int r = 0; r < lockstep::get_world_size(); ++r) {
    sum += input_of(r, elements);
  }
  return sum;
}

/// `parts(r)` for all ranks r, one after the other.
at::Tensor by_rank(const std::function<at::Tensor(int)>& parts) {
  std::vector<at::Tensor> all;
  for (int r = 0; r < lockstep::get_world_size(); ++r) all.push_back(parts(r));
  return at::cat(all);
}

/// An operation on its tensors.
struct Operation {
  std::function<void()> run;
  at::Tensor output;
  at::Tensor expected;  ///< undefined where the rank gets nothing
};

Operation prepare(const std::string& name, int64_t elements) {
  const int rank = lockstep::get_rank();
  const int world = lockstep::get_world_size();
  const int64_t share = elements / world;
  const auto own = [&](const at::Tensor& all) {
    return all.chunk(world)[rank];
  };

  if (name == "all_reduce") {
    auto data = input_of(rank, elements);
    return {[=]() mutable { lockstep::all_reduce(data); },
            data,
            sum_of_inputs(elements)};
  }
  if (name == "broadcast") {
    auto data = input_of(rank, elements);
    return {[=]() mutable { lockstep::broadcast(data, {.src = kRoot}); },
            data,
            input_of(kRoot, elements)};
  }
  if (name == "reduce") {
    auto data = input_of(rank, elements);
    return {[=]() mutable { lockstep::reduce(data, {.dst = kRoot}); },
            data,
            rank == kRoot ? sum_of_inputs(elements) : at::Tensor()};
  }
  if (name == "all_gather") {
    auto from = input_of(rank, share);
    auto to = at::zeros({elements});
    return {[=]() mutable { lockstep::all_gather_into_tensor(to, from); },
            to,
            by_rank([&](int r) { return input_of(r, share); })};
  }
  if (name == "reduce_scatter") {
    auto from = input_of(rank, elements);
    auto to = at::zeros({share});
    return {[=]() mutable { lockstep::reduce_scatter_tensor(to, from); },
            to,
            own(sum_of_inputs(elements))};
  }
  if (name == "all_to_all") {
    auto from = input_of(rank, elements);
    auto to = at::zeros({elements});
    return {[=]() mutable { lockstep::all_to_all_single(to, from); },
            to,
            by_rank([&](int r) { return own(input_of(r, elements)); })};
  }
  if (name == "gather") {
    auto from = input_of(rank, share);
    auto to = at::zeros({elements});
    std::vector<at::Tensor> list;
    if (rank == kRoot) list = to.chunk(world);
    return {[=]() mutable { lockstep::gather(from, list, {.dst = kRoot}); },
            to,
            rank == kRoot ? by_rank([&](int r) { return input_of(r, share); })
                          : at::Tensor()};
  }
  if (name == "scatter") {
    std::vector<at::Tensor> list;
    if (rank == kRoot) list = input_of(kRoot, elements).chunk(world);
    auto to = at::zeros({share});
    return {[=]() mutable { lockstep::scatter(to, list, {.src = kRoot}); },
            to,
            own(input_of(kRoot, elements))};
  }
  if (name == "send_recv") {  // from rank 0 to rank 1 and back
    auto from = input_of(kRoot, elements);
    auto to = at::zeros({elements});
    return {[=]() mutable {
              if (rank == kRoot) {
                lockstep::send(from, {.dst = 1});
                lockstep::recv(to, {.src = 1});
              } else {
                lockstep::recv(to, {.src = kRoot});
                lockstep::send(to, {.dst = kRoot});
              }
            },
            to,
            from};
  }
  throw std::invalid_argument("unknown operation " + name);
}

bool is_right(const std::string& name, int64_t elements) {
  const auto operation = prepare(name, elements);
  operation.run();
  return !operation.expected.defined() ||
         at::equal(operation.output, operation.expected);
}

double seconds_per_operation(const std::string& name,
                             int64_t elements,
                             int64_t count) {
  const auto operation = prepare(name, elements);
  operation.output.zero_();  // sums of sums would overflow
  operation.run();
  lockstep::barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i) operation.run();
  lockstep::barrier();
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count() / static_cast<double>(count);
}

}  // namespace

int main() {
  lockstep::init_process_group();
  std::string name;
  int64_t bytes = 0;
  int64_t count = 0;
  while (std::cin >> name >> bytes >> count) {
    const auto elements = bytes / static_cast<int64_t>(sizeof(float));
    const auto correct = is_right(name, elements);
    const auto seconds = seconds_per_operation(name, elements, count);
    std::cout << R"({"seconds": )" << seconds << R"(, "correct": )"
              << (correct ? "true" : "false") << '}' << std::endl;
  }
  lockstep::destroy_process_group();
}
