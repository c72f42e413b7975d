#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/backends/shm/wait.h"
#include "comm/p2p/frame.h"

namespace lockstep::comm::shm {

/// One way between two ranks: a queue of frames with a payload each, one writer
/// and one reader.
///
/// The n-th entry written (from 1) is there once its `sequence` is n, stored
/// with release order; its place may be written again once `taken` has reached
/// n. Each side keeps its own count; zeroed memory is an empty ring.
struct Ring {
  /// What comes along with a frame: large enough to make little of the handing
  /// over, small enough for two cores to copy one message at the same time.
  static constexpr size_t kPayload = 16 * 1024;
  static constexpr size_t kEntries = 32;

  struct alignas(64) Entry {
    std::atomic<uint64_t> sequence;
    p2p::Frame frame;
    alignas(64) char payload[kPayload];
  };

  alignas(64) std::atomic<uint64_t> taken;
  Entry entries[kEntries];
};

constexpr size_t whole_pages(size_t bytes) {
  constexpr size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

class RingWriter {
 public:
  explicit RingWriter(Ring& ring) : ring_(ring) {}

  [[nodiscard]] bool has_room() {
    if (written_ - taken_ < Ring::kEntries) return true;
    taken_ = ring_.taken.load(std::memory_order_acquire);
    return written_ - taken_ < Ring::kEntries;
  }

  /// Needs room.
  void write(const p2p::Frame& frame, const char* payload) {
    auto& entry = ring_.entries[written_ % Ring::kEntries];
    entry.frame = frame;
    if (frame.bytes > 0) std::memcpy(entry.payload, payload, frame.bytes);
    entry.sequence.store(++written_, std::memory_order_release);
  }

 private:
  Ring& ring_;
  uint64_t written_ = 0;
  uint64_t taken_ = 0;
};

class RingReader {
 public:
  explicit RingReader(Ring& ring) : ring_(ring) {}

  /// The oldest entry that was not taken yet; null: none.
  [[nodiscard]] const Ring::Entry* front() const {
    const auto& entry = ring_.entries[taken_ % Ring::kEntries];
    const bool there =
        entry.sequence.load(std::memory_order_acquire) == taken_ + 1;
    return there ? &entry : nullptr;
  }
  void take() { ring_.taken.store(++taken_, std::memory_order_release); }

 private:
  Ring& ring_;
  uint64_t taken_ = 0;
};

/// Where things lie in the group's segment for messages: what is there from the
/// start, a bell per rank and a byte per pair that says whether its rings are
/// in use; then two rings per pair, whose pages are reserved when the first of
/// the two ranks uses them.
class RingLayout {
 public:
  struct alignas(64) Control {
    Doorbell bell;
    /// How often a pair of this rank came into use.
    alignas(64) std::atomic<uint32_t> opened;
  };

  explicit constexpr RingLayout(int ranks)
      : ranks_(static_cast<size_t>(ranks)) {}

  [[nodiscard]] constexpr size_t control(int rank) const {
    return static_cast<size_t>(rank) * sizeof(Control);
  }
  /// A std::atomic<uint8_t>.
  [[nodiscard]] constexpr size_t in_use(int a, int b) const {
    return ranks_ * sizeof(Control) + number(a, b);
  }
  [[nodiscard]] constexpr size_t start_bytes() const {
    return whole_pages(ranks_ * sizeof(Control) + pairs());
  }
  [[nodiscard]] constexpr size_t pair(int a, int b) const {
    return start_bytes() + number(a, b) * kPairBytes;
  }
  [[nodiscard]] constexpr size_t ring(int from, int to) const {
    return pair(from, to) + (from < to ? 0 : sizeof(Ring));
  }
  [[nodiscard]] constexpr size_t bytes() const {
    return start_bytes() + pairs() * kPairBytes;
  }

  /// Of one pair: about 1 MB.
  static constexpr size_t kPairBytes = whole_pages(2 * sizeof(Ring));

 private:
  [[nodiscard]] constexpr size_t pairs() const {
    return ranks_ * (ranks_ - 1) / 2;
  }
  /// Of a pair, in the order 0-1, 0-2, 1-2, 0-3, ...
  static constexpr size_t number(int a, int b) {
    const auto low = static_cast<size_t>(a < b ? a : b);
    const auto high = static_cast<size_t>(a < b ? b : a);
    return high * (high - 1) / 2 + low;
  }

  size_t ranks_;
};

}  // namespace lockstep::comm::shm
