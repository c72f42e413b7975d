#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>

namespace lockstep::comm::liveness {

/// A culprit with the time at which the death was recorded.
struct Verdict {
  int rank = -1;
  int64_t time = 0;         ///< nanoseconds of the wall clock
  std::string reason = {};  ///< empty: it died without a word
  /// The earlier one holds; all ranks order the same way.
  [[nodiscard]] bool operator<(const Verdict& other) const {
    return std::tie(time, rank) < std::tie(other.time, other.rank);
  }
};

inline int64_t wall_clock() {
  return std::chrono::nanoseconds(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace lockstep::comm::liveness
