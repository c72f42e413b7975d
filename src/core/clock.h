#pragma once

#include <algorithm>
#include <chrono>
#include <climits>

namespace lockstep {

using Clock = std::chrono::steady_clock;

/// Longer time limits are cut to this one: added to a point in time they would
/// overflow.
constexpr std::chrono::milliseconds kLongestWait =
    std::chrono::hours(10 * 365 * 24);

/// A time limit as `poll` takes it.
inline int poll_limit(std::chrono::milliseconds timeout) {
  return static_cast<int>(std::clamp<int64_t>(timeout.count(), 0, INT_MAX));
}

/// A point in time after which a wait gives up.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout)
      : start_(Clock::now()),
        end_(start_ +
             std::clamp(timeout, std::chrono::milliseconds(0), kLongestWait)) {}

  [[nodiscard]] bool passed() const { return Clock::now() >= end_; }
  /// Never negative.
  [[nodiscard]] std::chrono::milliseconds remaining() const {
    const auto left = end_ - Clock::now();
    return left.count() > 0 ? std::chrono::ceil<std::chrono::milliseconds>(left)
                            : std::chrono::milliseconds(0);
  }
  [[nodiscard]] std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() -
                                                                 start_);
  }

 private:
  Clock::time_point start_;
  Clock::time_point end_;
};

}  // namespace lockstep
