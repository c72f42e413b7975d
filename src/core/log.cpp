#include "lockstep/core/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

namespace lockstep::log {
namespace {

Level level_from_environment() noexcept {
  const char* value = std::getenv("LOCKSTEP_LOG_LEVEL");
  const std::string_view name = value ? value : "";
  if (name == "error") return Level::Error;
  if (name == "info") return Level::Info;
  if (name == "debug") return Level::Debug;
  return Level::Warning;
}

std::atomic<Level>& current_level() noexcept {
  static std::atomic<Level> level{level_from_environment()};
  return level;
}

std::atomic<int> own_rank{-1};
std::atomic<int> own_world_size{0};

const char* name_of(Level level) noexcept {
  switch (level) {
    case Level::Error:
      return "error";
    case Level::Warning:
      return "warning";
    case Level::Info:
      return "info";
    case Level::Debug:
      return "debug";
  }
  return "";
}

}  // namespace

Level level() noexcept {
  return current_level().load();
}

void set_level(Level level) noexcept {
  current_level().store(level);
}

void set_rank(int rank, int world_size) noexcept {
  own_rank.store(rank);
  own_world_size.store(world_size);
}

void write(Level severity, std::string_view message) noexcept {
  if (severity > level()) return;
  try {
    std::string line = "lockstep ";
    line += name_of(severity);
    const int rank = own_rank.load();
    if (rank >= 0) {
      line += " [rank " + std::to_string(rank) + '/' +
              std::to_string(own_world_size.load()) + ']';
    }
    line += ": ";
    line += message;
    line += '\n';
    [[maybe_unused]] const auto written =
        ::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {
  }
}

}  // namespace lockstep::log
