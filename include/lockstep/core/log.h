#pragma once

#include <string_view>

#include "lockstep/core/export.h"

namespace lockstep::log {

/// Severity, in rising order of detail. The default is `Warning`;
/// `LOCKSTEP_LOG_LEVEL` (`error`, `warning`, `info`, `debug`) changes it.
enum class Level { Error, Warning, Info, Debug };

/// The level in force. Read from the environment once. Thread safe.
[[nodiscard]] LOCKSTEP_API Level level() noexcept;

/// Sets the level for the process. Thread safe.
LOCKSTEP_API void set_level(Level level) noexcept;

/// Puts `[rank R/W]` before each line of the calling process (a negative rank
/// removes it). Thread safe.
LOCKSTEP_API void set_rank(int rank, int world_size) noexcept;

/// Writes one line to stderr in one system call, so that lines of several
/// ranks are never torn. Does nothing below the level in force. Thread safe.
LOCKSTEP_API void write(Level level, std::string_view message) noexcept;

inline void error(std::string_view message) noexcept {
  write(Level::Error, message);
}
inline void warning(std::string_view message) noexcept {
  write(Level::Warning, message);
}
inline void info(std::string_view message) noexcept {
  write(Level::Info, message);
}
inline void debug(std::string_view message) noexcept {
  write(Level::Debug, message);
}

}  // namespace lockstep::log
