#include "launch/cpus.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

namespace fs = std::filesystem;

int whole_cpus(double quota, double period) {
  if (quota <= 0 || period <= 0) return INT_MAX;
  return std::max(1, static_cast<int>(quota / period));
}

/// cpu.max of control groups version 2: "max 100000" or "150000 100000".
int quota_v2(const fs::path& group) {
  std::ifstream file(group / "cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max") return INT_MAX;
  return whole_cpus(std::strtod(quota.c_str(), nullptr), period);
}

int quota_v1(const fs::path& group) {
  double quota = 0;
  double period = 0;
  if (!(std::ifstream(group / "cpu.cfs_quota_us") >> quota) ||
      !(std::ifstream(group / "cpu.cfs_period_us") >> period)) {
    return INT_MAX;
  }
  return whole_cpus(quota, period);
}

/// The smallest quota of a group and the groups that contain it.
int smallest_quota(const fs::path& mount,
                   const std::string& group,
                   int (*quota_of)(const fs::path&)) {
  int smallest = quota_of(mount);
  fs::path directory = mount;
  for (const auto& name : fs::path(group).relative_path()) {
    directory /= name;
    smallest = std::min(smallest, quota_of(directory));
  }
  return smallest;
}

int affinity_cpus() {
  // The mask of a machine with more CPUs than cpu_set_t holds needs more room.
  for (int capacity = CPU_SETSIZE; capacity <= (1 << 20); capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(capacity));
    if (set == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(capacity));
    const bool known = sched_getaffinity(0, size, set) == 0;
    const int count = known ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (known) return std::max(1, count);
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

int cpu_quota(const std::string& root) {
  const fs::path mount = fs::path(root) / "sys/fs/cgroup";
  std::ifstream groups(fs::path(root) / "proc/self/cgroup");
  int smallest = INT_MAX;
  // Each line reads "number:controllers:/group"; version 2 names none.
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers =
        ',' + line.substr(first + 1, second - first - 1) + ',';
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      smallest = std::min(smallest, smallest_quota(mount, group, quota_v2));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      smallest =
          std::min(smallest, smallest_quota(mount / "cpu", group, quota_v1));
    }
  }
  return smallest;
}

int allowed_cpus() {
  return std::min(affinity_cpus(), cpu_quota());
}

int visible_gpus() {
  int devices = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename();
    if (name.size() > 6 && name.starts_with("nvidia") &&
        name.find_first_not_of("0123456789", 6) == std::string::npos) {
      ++devices;
    }
  }
  const char* shown = std::getenv("CUDA_VISIBLE_DEVICES");
  if (shown == nullptr) return devices;
  // CUDA ignores the list from the first entry that names no device.
  int listed = 0;
  std::istringstream list(shown);
  for (std::string item; std::getline(list, item, ',');) {
    if (item.empty() || item.starts_with('-')) break;
    ++listed;
  }
  return std::min(devices, listed);
}

int worker_count(const std::string& text) {
  if (text == "cpu") return allowed_cpus();
  if (text == "auto" || text == "gpu") {
    const int gpus = visible_gpus();
    if (gpus > 0) return gpus;
    if (text == "auto") return allowed_cpus();
    throw InvalidArgument(
        "--nproc-per-node gpu: no GPU is visible here; give a number, cpu or "
        "auto, or check CUDA_VISIBLE_DEVICES");
  }
  int number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < 1) {
    throw InvalidArgument("--nproc-per-node \"" + text +
                          "\" is neither a number from 1 on nor auto, cpu or "
                          "gpu");
  }
  return number;
}

}  // namespace lockstep::launcher
