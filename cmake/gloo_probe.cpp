// Exits 0 when the Gloo inside libtorch works through our declarations of it:
// two threads reduce one tensor. Ends by itself within 30 s.
#define USE_C10D_GLOO
#include <ATen/ATen.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

int main() {
  using c10d::ProcessGroupGloo;
  ::alarm(30);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  bool right[2] = {};
  const auto rank_main = [&](int rank) {
    auto options = ProcessGroupGloo::Options::create(std::chrono::seconds(10));
    options->devices = {ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
    ProcessGroupGloo group(store, rank, 2, options);
    std::vector<at::Tensor> tensors = {at::full({4}, rank + 1.0)};
    group.allreduce(tensors)->wait();
    right[rank] = at::equal(tensors[0], at::full({4}, 3.0));
  };
  std::thread other(rank_main, 1);
  rank_main(0);
  other.join();
  return right[0] && right[1] ? 0 : 1;
}
