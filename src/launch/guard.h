#pragma once

#include <sys/types.h>

#include <cstddef>

#include "core/fd.h"

namespace lockstep::launcher {

/// A small process beside the workers that kills their process groups when
/// this process dies, however it dies: it reads a socket whose other end
/// only this process and its workers before exec hold.
class Guard {
 public:
  /// Room for `capacity` groups at a time. Throws LaunchError.
  explicit Guard(size_t capacity);
  /// Ends the guard. Groups that are still watched are killed.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Starts watching the caller's own process group. For a child between fork
  /// and exec; async-signal-safe.
  void watch_self() const noexcept;
  /// Stops watching a group. Call before its leader is reaped, since then its
  /// number may be used again.
  void forget(pid_t group) const noexcept;

 private:
  pid_t pid_ = -1;
  Fd socket_;
};

}  // namespace lockstep::launcher
