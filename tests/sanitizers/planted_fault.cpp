// Faults of the kind that the sanitizer in force must report. `./dev sanitize`
// runs each to show that the check can fail.
//
// usage: planted_fault [hook | tensor]   (the words: -fsanitize=thread only)
#include <climits>
#include <string>
#include <thread>
#include <vector>

#if defined(FAULT_thread)
#include <torch/torch.h>
#endif

namespace {

#if defined(FAULT_address)
int fault(const std::string& name) {
  std::vector<int> values(4);
  return values.data()[4 + name.size()];
}
#elif defined(FAULT_thread)
template <class First, class Second>
void at_once(First first, Second second) {
  std::thread other(first);
  second();
  other.join();
}

int fault(const std::string& name) {
  int value = 0;
  const auto add = [&] { ++value; };
  if (name == "hook") {
    // libtorch's frames stand above those of the hook.
    const auto backward = [&] {
      auto x = torch::ones({1}, torch::requires_grad());
      x.register_hook([&](const torch::Tensor&) { add(); });
      x.backward();
    };
    at_once(backward, add);
  } else if (name == "tensor") {
    const auto tensor = torch::zeros({1}, torch::kInt);
    const auto write = [&] { ++tensor.data_ptr<int>()[0]; };
    at_once(write, write);
  } else {
    at_once(add, add);
  }
  return value;
}
#else
int fault(const std::string& name) {
  return INT_MAX - static_cast<int>(name.size()) + 1;
}
#endif

}  // namespace

int main(int argc, char** argv) {
  return fault(argc > 1 ? argv[1] : "") == 0 ? 0 : 1;
}
