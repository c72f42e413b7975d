#pragma once

#include <atomic>
#include <exception>
#include <mutex>

#include "lockstep/core/error.h"

namespace lockstep::comm {

/// The error after which a group cannot be used again.
///
/// Thread safety: all members.
class FirstFailure {
 public:
  /// The first call counts.
  void note(std::exception_ptr error);
  /// One load.
  [[nodiscard]] bool happened() const noexcept {
    return happened_.load(std::memory_order_acquire);
  }
  /// Null: none.
  [[nodiscard]] std::exception_ptr error() const;
  /// Throws BackendError that repeats it.
  [[noreturn]] void refuse(ErrorContext context) const;

 private:
  std::atomic<bool> happened_{false};
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace lockstep::comm
