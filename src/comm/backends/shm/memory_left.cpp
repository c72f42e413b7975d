#include "comm/backends/shm/memory_left.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace lockstep::comm::shm {
namespace {

/// The number at the start of the file; nullopt for "max" or no file.
std::optional<size_t> read_number(const std::filesystem::path& path) {
  std::ifstream file(path);
  size_t value;
  if (file >> value) return value;
  return std::nullopt;
}

/// The number behind `key` in a file of lines "key number".
std::optional<size_t> read_field(const std::filesystem::path& path,
                                 const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    size_t value;
    if (word == key && file >> value) return value;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

/// What the control group in `folder` leaves; its file cache can be dropped.
size_t group_left(const std::filesystem::path& folder,
                  const char* limit_file,
                  const char* usage_file) {
  const auto limit = read_number(folder / limit_file);
  const auto usage = read_number(folder / usage_file);
  if (!limit || !usage) return SIZE_MAX;
  const auto stat = folder / "memory.stat";
  const size_t cached = read_field(stat, "inactive_file").value_or(0) +
                        read_field(stat, "active_file").value_or(0);
  const size_t bound = *usage > cached ? *usage - cached : 0;
  return *limit > bound ? *limit - bound : 0;
}

/// The same of the group `path` below `root` and of all groups around it. In a
/// container that sees its own group as the root, only the root exists.
size_t groups_left(const std::filesystem::path& root,
                   const std::filesystem::path& path,
                   const char* limit_file,
                   const char* usage_file) {
  size_t left = group_left(root, limit_file, usage_file);
  auto folder = root;
  for (const auto& name : path.relative_path()) {
    folder /= name;
    left = std::min(left, group_left(folder, limit_file, usage_file));
  }
  return left;
}

}  // namespace

size_t memory_left() {
  const auto kib = read_field("/proc/meminfo", "MemAvailable:");
  size_t left = kib ? *kib * 1024 : SIZE_MAX;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::string path = line.substr(line.rfind(':') + 1);
    if (line.starts_with("0::")) {
      left = std::min(
          left,
          groups_left("/sys/fs/cgroup", path, "memory.max", "memory.current"));
    } else if (line.find(":memory:") != std::string::npos) {
      left = std::min(left,
                      groups_left("/sys/fs/cgroup/memory",
                                  path,
                                  "memory.limit_in_bytes",
                                  "memory.usage_in_bytes"));
    }
  }
  return left;
}

}  // namespace lockstep::comm::shm
