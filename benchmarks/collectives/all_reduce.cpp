// One rank of the benchmark `collectives`. Reads lines "BYTES OPERATIONS" and
// answers {"seconds": per operation, "correct": whether a sum was right}.

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <iostream>

#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"

namespace {

/// Rank r's element i is i % 1000 + r.
bool sums_are_right(int64_t elements) {
  const auto ramp = at::arange(elements, at::kFloat).remainder(1000);
  const auto world = lockstep::get_world_size();
  auto tensor = ramp + lockstep::get_rank();
  lockstep::all_reduce(tensor);
  return at::equal(tensor, ramp * world + world * (world - 1) / 2);
}

double seconds_per_operation(int64_t elements, int64_t operations) {
  auto tensor = at::zeros({elements}, at::kFloat);
  lockstep::all_reduce(tensor);
  lockstep::barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < operations; ++i) lockstep::all_reduce(tensor);
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count() / static_cast<double>(operations);
}

}  // namespace

int main() {
  lockstep::init_process_group();
  int64_t bytes = 0;
  int64_t operations = 0;
  while (std::cin >> bytes >> operations) {
    const auto elements = bytes / static_cast<int64_t>(sizeof(float));
    const auto correct = sums_are_right(elements);
    const auto seconds = seconds_per_operation(elements, operations);
    std::cout << R"({"seconds": )" << seconds << R"(, "correct": )"
              << (correct ? "true" : "false") << '}' << std::endl;
  }
  lockstep::destroy_process_group();
}
