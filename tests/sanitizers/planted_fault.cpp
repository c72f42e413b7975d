// A fault of the kind that the sanitizer in force must report. `./dev sanitize`
// runs it to show that the check can fail.
#include <climits>
#include <thread>
#include <vector>

namespace {

#if defined(FAULT_address)
int fault(int offset) {
  std::vector<int> values(4);
  return values.data()[4 + offset];
}
#elif defined(FAULT_thread)
int fault(int start) {
  int value = start;
  std::thread other([&] { ++value; });
  ++value;
  other.join();
  return value;
}
#else
int fault(int offset) { return INT_MAX - offset + 1; }
#endif

}  // namespace

int main(int argc, char**) { return fault(argc - 1) == 0 ? 0 : 1; }
