#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/backends/shm/layout.h"
#include "comm/backends/shm/segment.h"
#include "comm/backends/shm/wait.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::shm {

/// The group's segment and the steps in which its ranks go through an
/// operation. Every operation starts with `begin`; nobody passes it before all
/// have come, so everything of the operation before is finished then.
///
/// Not thread safe: one operation at a time.
class Channel {
 public:
  /// Collective over all ranks, which share this host: returns when all have
  /// mapped the segment. Throws PeerLost, TimeoutError, BackendError.
  Channel(std::shared_ptr<Liveness> liveness,
          std::string group,
          std::chrono::milliseconds timeout);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const Liveness& liveness() const { return *liveness_; }
  /// Of the operation under way.
  [[nodiscard]] ErrorContext context() const;

  /// The own staging slot of the operation that `begin` will start.
  [[nodiscard]] char* next_staging() const {
    return base() + layout_.staging(rank_, sequence_ + 1);
  }

  /// Announces the operation, waits for all ranks and compares.
  /// Throws MismatchError (on every rank), PeerLost, TimeoutError.
  void begin(const Fingerprint& fingerprint, std::chrono::milliseconds timeout);

  /// What the rank had staged when it began the operation under way.
  [[nodiscard]] const char* staging(int rank) const {
    return base() + layout_.staging(rank, sequence_);
  }
  [[nodiscard]] char* input(int rank, uint64_t turn) const {
    return base() + layout_.input(rank, turn);
  }
  [[nodiscard]] char* output(int rank, uint64_t turn) const {
    return base() + layout_.output(rank, turn);
  }
  [[nodiscard]] char* exchange(int rank, uint64_t turn) const {
    return base() + layout_.exchange(rank, turn);
  }

  /// Returns when all ranks have come to this step of the operation; what they
  /// wrote before it can be read after it. Throws PeerLost, TimeoutError.
  void step();

 private:
  [[nodiscard]] char* base() const { return segment_->data(); }
  [[nodiscard]] RankControl& control(int rank) const {
    return *reinterpret_cast<RankControl*>(base() + layout_.control(rank));
  }
  template <class Flag>
  void arrive(uint64_t value, Flag flag);
  void compare(const Fingerprint& own) const;

  std::shared_ptr<Liveness> liveness_;
  std::string group_;
  int rank_;
  int size_;
  Layout layout_;
  std::shared_ptr<Segment> segment_;
  Waiter waiter_;
  uint64_t sequence_ = 0;
  uint64_t steps_ = 0;
  const char* operation_ = "";  ///< none yet
  std::chrono::milliseconds timeout_;
};

}  // namespace lockstep::comm::shm
