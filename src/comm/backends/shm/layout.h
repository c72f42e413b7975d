#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/backends/shm/wait.h"
#include "comm/fingerprint.h"

namespace lockstep::comm::shm {

/// A rank's announcement of one operation: flag and fingerprint share a cache
/// line, so comparing costs no further transfer between cores.
struct alignas(64) Announcement {
  std::atomic<uint64_t> sequence{0};
  Fingerprint fingerprint;
};
static_assert(sizeof(Announcement) == 64);

/// How often a rank has come to a synchronisation point within operations.
struct alignas(64) Progress {
  std::atomic<uint64_t> steps{0};
};

/// A rank's control words. Announcements alternate: while a slow rank still
/// reads one, nobody can be further ahead than writing the other.
struct RankControl {
  Doorbell bell;
  Progress progress;
  std::array<Announcement, 2> announcements;
};

/// Where things lie in the group's one segment: the control words of all ranks,
/// then per rank two staging slots for small messages, two input slots and two
/// output slots for the chunks of large ones. A group of two has in place of
/// its input slots three of half a chunk for its large all-reduce.
///
/// Bytes for 2, 8 and 64 ranks: 1, 3.4 and 25 MB.
class Layout {
 public:
  explicit constexpr Layout(int ranks)
      : ranks_(static_cast<size_t>(ranks)),
        output_(round_up(kChunk / ranks_ + kLine)) {}

  /// Largest message of a rank that goes through the staging slots.
  static constexpr size_t kStaging = 64 * 1024;
  /// Bytes of an input slot, all that a rank contributes to one chunk: small
  /// enough for the chunks under way to stay in a core's own cache.
  static constexpr size_t kChunk = 128 * 1024;
  static constexpr size_t kLine = 64;
  /// So that a chunk has a line for every rank.
  static constexpr int kMostRanks = kChunk / kLine;

  [[nodiscard]] constexpr size_t bytes() const {
    return ranks_ * (sizeof(RankControl) + per_rank());
  }
  [[nodiscard]] constexpr size_t control(int rank) const {
    return static_cast<size_t>(rank) * sizeof(RankControl);
  }
  [[nodiscard]] constexpr size_t staging(int rank, uint64_t turn) const {
    return slots(place(rank, turn)) + turn % 2 * kStaging;
  }
  [[nodiscard]] constexpr size_t input(int rank, uint64_t turn) const {
    return slots(place(rank, turn)) + 2 * kStaging + turn % 2 * kChunk;
  }
  [[nodiscard]] constexpr size_t output(int rank, uint64_t turn) const {
    return slots(rank) + 2 * (kStaging + kChunk) + turn % 2 * output_;
  }
  /// In place of the input slots: three of half a chunk.
  [[nodiscard]] constexpr size_t exchange(int rank, uint64_t turn) const {
    static_assert(3 * kChunk / 2 <= 2 * kChunk);
    return slots(rank) + 2 * kStaging + turn % 3 * (kChunk / 2);
  }

 private:
  static constexpr size_t round_up(size_t bytes) {
    return (bytes + kLine - 1) / kLine * kLine;
  }
  /// Whose place a rank's slots are in. Two ranks trade places whenever they
  /// use the slots again: a core writes fastest where it read last.
  [[nodiscard]] constexpr int place(int rank, uint64_t turn) const {
    return ranks_ == 2 ? rank ^ static_cast<int>(turn / 2 % 2) : rank;
  }
  [[nodiscard]] constexpr size_t per_rank() const {
    return 2 * (kStaging + kChunk + output_);
  }
  [[nodiscard]] constexpr size_t slots(int rank) const {
    return ranks_ * sizeof(RankControl) +
           static_cast<size_t>(rank) * per_rank();
  }

  size_t ranks_;
  size_t output_;
};

}  // namespace lockstep::comm::shm
