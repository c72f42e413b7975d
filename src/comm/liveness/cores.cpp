#include "comm/liveness/cores.h"

#include <sched.h>

#include <algorithm>
#include <set>
#include <sstream>

namespace lockstep::comm::liveness {
namespace {

constexpr int kMostCores = 1 << 20;

std::vector<int> allowed_cores() {
  // The mask of a machine with more cores than cpu_set_t holds needs more room.
  for (int capacity = CPU_SETSIZE; capacity <= kMostCores; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(capacity));
    if (set == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(capacity));
    const bool known = ::sched_getaffinity(0, size, set) == 0;
    std::vector<int> cores;
    for (int core = 0; known && core < capacity; ++core) {
      if (CPU_ISSET_S(core, size, set)) cores.push_back(core);
    }
    CPU_FREE(set);
    if (known) return cores;
  }
  return {};
}

}  // namespace

std::string own_cores() {
  const auto cores = allowed_cores();
  if (cores.empty()) return "?";
  std::ostringstream text;
  for (size_t i = 0; i < cores.size();) {
    size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) {
      ++last;
    }
    if (i > 0) text << ',';
    text << cores[i];
    if (last > i) text << '-' << cores[last];
    i = last + 1;
  }
  return text.str();
}

int count_together(const std::vector<std::string>& cores) {
  std::set<int> together;
  for (const auto& word : cores) {
    std::istringstream ranges(word);
    for (std::string range; std::getline(ranges, range, ',');) {
      std::istringstream fields(range);
      int first = 0;
      if (!(fields >> first)) continue;
      int last = first;
      char dash = 0;
      if (fields >> dash) fields >> last;
      last = std::min(last, kMostCores - 1);
      for (int core = first; core <= last; ++core) together.insert(core);
    }
  }
  return std::max(1, static_cast<int>(together.size()));
}

}  // namespace lockstep::comm::liveness
