#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "comm/backends/shm/segment.h"
#include "comm/backends/shm/wait.h"

namespace lockstep::nn {

/// How far a rank has come: the round in the upper bits, a count in the lower,
/// so that a later round is always the greater number.
constexpr int kCountBits = 24;
constexpr uint64_t progress(uint64_t round, uint64_t count) {
  return round << kCountBits | count;
}

/// What one rank tells the others, in shared memory. Written by that rank only.
struct RankState {
  comm::shm::Doorbell bell;
  alignas(64) std::atomic<uint64_t> begun;  ///< the last round that began
  std::atomic<uint64_t> completed;          ///< the last one finished well
  std::atomic<uint64_t> abandoned;          ///< the last one that was not
  std::atomic<uint64_t> staged;             ///< pieces ready to be read by all
  std::atomic<uint64_t> consumed;           ///< pieces read, of all ranks
  std::atomic<uint64_t> placed;   ///< large gradients whose place is published
  std::atomic<uint64_t> reduced;  ///< large gradients with own share reduced
  /// Parameters without a gradient in the abandoned round, at most so many.
  static constexpr size_t kMaxUnready = 32;
  std::atomic<uint32_t> n_unready;
  std::atomic<uint32_t> unready[kMaxUnready];
};

/// The segment of one wrapper. For each rank its state; two buffers through
/// which its gradients pass in pieces; the places of its large gradients.
class SharedControl {
 public:
  static constexpr size_t kPieceBytes = 256 * 1024;
  /// A place of a gradient that lies in ordinary memory.
  static constexpr uint64_t kNowhere = UINT64_MAX;

  SharedControl(std::shared_ptr<comm::shm::Segment> segment,
                int ranks,
                size_t n_large)
      : segment_(std::move(segment)),
        ranks_(static_cast<size_t>(ranks)),
        n_large_(n_large) {}

  static size_t bytes(int ranks, size_t n_large) {
    return static_cast<size_t>(ranks) *
           (sizeof(RankState) + 2 * kPieceBytes + n_large * sizeof(uint64_t));
  }
  [[nodiscard]] RankState& state(int rank) const {
    return reinterpret_cast<RankState*>(segment_->data())[rank];
  }
  [[nodiscard]] char* buffer(int rank, size_t number) const {
    return segment_->data() + ranks_ * sizeof(RankState) +
           (2 * static_cast<size_t>(rank) + number) * kPieceBytes;
  }
  /// Where the rank's large gradient lies in its own segment. Written before
  /// `placed` is raised.
  [[nodiscard]] uint64_t& place(int rank, size_t large) const {
    auto* first = reinterpret_cast<uint64_t*>(
        segment_->data() + ranks_ * (sizeof(RankState) + 2 * kPieceBytes));
    return first[static_cast<size_t>(rank) * n_large_ + large];
  }

 private:
  std::shared_ptr<comm::shm::Segment> segment_;
  size_t ranks_;
  size_t n_large_;
};

}  // namespace lockstep::nn
