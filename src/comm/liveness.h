#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "core/fd.h"
#include "lockstep/core/error.h"
#include "lockstep/core/export.h"

namespace lockstep::comm {

/// The verdict on a lost peer; all survivors hold the same one.
struct PeerFailure {
  int rank = -1;
  int pid = 0;
  std::string host;
  /// Empty when the process died without a word; else the error's text that it
  /// announced before it left.
  std::string reason;
};

/// Watches the ranks of a job over control connections (Unix sockets between
/// all ranks of a host, TCP along a tree between hosts) with one thread, and
/// passes file descriptors between ranks of one host. The same for all
/// backends. Needs the store only while it starts.
///
/// Thread safety: all members, except construction and destruction.
class LOCKSTEP_API Liveness {
 public:
  /// Collective over all ranks. Publishes this rank's endpoint, secret and
  /// cores under `store`, connects, and learns which ranks share the host by
  /// really connecting to them. Throws TimeoutError naming the ranks that did
  /// not arrive.
  static std::shared_ptr<Liveness> start(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int world_size,
      std::chrono::milliseconds timeout);

  /// The same for some ranks of `whole`, in this order, the own one included.
  /// They share a host where they do so in `whole`.
  static std::shared_ptr<Liveness> start_part(
      const Liveness& whole,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout);

  virtual ~Liveness() = default;

  /// Ranks on this host, own one included, ascending.
  [[nodiscard]] virtual const std::vector<int>& host_ranks() const = 0;
  /// Cores that at least one of them may use: launchers may give each its own.
  /// 1 in a world of one, which waits for nobody.
  [[nodiscard]] virtual int host_cores() const = 0;
  [[nodiscard]] bool single_host() const {
    return static_cast<int>(host_ranks().size()) == world_size();
  }
  /// Whether more ranks share the host than cores. A part is as crowded as the
  /// whole.
  [[nodiscard]] bool is_crowded() const {
    return part_of_crowd_ ||
           host_ranks().size() > static_cast<size_t>(host_cores());
  }
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int world_size() const = 0;

  /// The number that errors name a rank by: the one that it has in the whole.
  /// All other numbers here are those of this group.
  [[nodiscard]] int global_rank(int rank) const {
    return global_ranks_.empty() ? rank : global_ranks_.at(rank);
  }
  [[nodiscard]] std::vector<int> global_ranks(std::vector<int> ranks) const {
    for (int& rank : ranks) rank = global_rank(rank);
    return ranks;
  }
  [[nodiscard]] int global_world_size() const {
    return global_ranks_.empty() ? world_size() : global_world_size_;
  }
  /// The rank here of a global rank; nothing where that is no member.
  [[nodiscard]] std::optional<int> rank_of(int global_rank) const;
  /// The context of an error of this rank, whatever it does.
  [[nodiscard]] ErrorContext error_context() const {
    return {.rank = global_rank(rank()), .world_size = global_world_size()};
  }

  /// One load, for the inner loop of a wait: whether some peer failed, left or
  /// gave up. Then look at `failure()`, `has_left()` and `timed_out()`.
  [[nodiscard]] bool disturbed() const noexcept {
    return disturbed_.load(std::memory_order_acquire);
  }
  /// The earliest recorded death or failure, if there was one.
  [[nodiscard]] virtual std::optional<PeerFailure> failure() const = 0;
  /// Whether the rank said goodbye in good order (after it finished its part
  /// of everything it had called).
  [[nodiscard]] virtual bool has_left(int rank) const = 0;

  /// `callback` runs on the monitor thread whenever a peer failed, left or gave
  /// up, and at once if that already happened. It must not block. Returns an id
  /// for `unsubscribe`, which waits for a running callback.
  virtual uint64_t subscribe(std::function<void()> callback) = 0;
  virtual void unsubscribe(uint64_t id) = 0;

  /// Tells all ranks that this one ends with `reason`. The culprit is this
  /// rank, or the one that it gave up on. When `failure()` is set already, this
  /// rank leaves as a consequence. First call counts. Returns when the messages
  /// were handed to the kernel.
  virtual void announce_failure(const std::string& reason,
                                std::optional<int> culprit = {}) = 0;

  /// Says goodbye; afterwards peers do not take the end of this process for a
  /// death. Never throws.
  virtual void leave() noexcept = 0;

  /// The number of the operation that this rank has come to, for those that
  /// ask.
  void set_progress(uint64_t sequence) noexcept {
    progress_.store(sequence, std::memory_order_relaxed);
  }
  /// Asks every rank how far it has come. By rank; nullopt where no answer came
  /// within `limit`: the process is stopped, or cannot be reached.
  virtual std::vector<std::optional<uint64_t>> ask_progress(
      std::chrono::milliseconds limit) = 0;
  /// Tells all ranks that this one waited for `ranks` in vain and has given up.
  virtual void announce_timeout(const std::vector<int>& ranks) = 0;
  /// The error to throw where a rank gave up: names those that it waited for.
  [[nodiscard]] virtual std::optional<TimeoutError> timed_out(
      ErrorContext context) const = 0;

  /// Sends a descriptor to a rank of this host under a name.
  virtual void send_fd(int peer, const std::string& name, int fd) = 0;
  /// Waits for the descriptor that `peer` sent under `name` (CLOEXEC is set).
  /// Throws PeerLost or TimeoutError.
  virtual Fd receive_fd(int peer,
                        const std::string& name,
                        std::chrono::milliseconds timeout) = 0;

  /// The error to throw for the present state while rank(s) `waiting_for` have
  /// not arrived: PeerLost that names the culprit, or nullopt when nothing
  /// that matters to them happened.
  [[nodiscard]] virtual std::optional<PeerLost> peer_lost(
      const std::vector<int>& waiting_for, ErrorContext context) const = 0;

 protected:
  /// Call before anything is named.
  void be_part_of(const Liveness& whole, const std::vector<int>& ranks);

  std::atomic<bool> disturbed_{false};
  std::atomic<uint64_t> progress_{0};

 private:
  std::vector<int> global_ranks_;  ///< by rank; empty: they are the ranks
  int global_world_size_ = 0;
  bool part_of_crowd_ = false;
};

}  // namespace lockstep::comm
