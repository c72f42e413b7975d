#pragma once

#include <memory>
#include <vector>

#include "comm/liveness.h"

namespace lockstep::comm::liveness {

/// The ranks of this host as a group of their own, through the connections of
/// the whole. It hears of every rank of the whole that is lost or gives up,
/// since what its ranks wait for may hang on any of them; and what it announces
/// goes to all.
class HostPart final : public Liveness {
 public:
  explicit HostPart(std::shared_ptr<Liveness> whole);
  ~HostPart() override;

  const std::vector<int>& host_ranks() const override { return all_; }
  int host_cores() const override { return whole_->host_cores(); }
  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(all_.size()); }

  /// Its rank is -1 where the culprit is on another host.
  std::optional<PeerFailure> failure() const override;
  bool has_left(int rank) const override;
  uint64_t subscribe(std::function<void()> callback) override;
  void unsubscribe(uint64_t id) override;
  void announce_failure(const std::string& reason,
                        std::optional<int> culprit) override;
  /// Does nothing: a rank leaves the whole.
  void leave() noexcept override {}
  std::vector<std::optional<uint64_t>> ask_progress(
      std::chrono::milliseconds limit) override;
  void announce_timeout(const std::vector<int>& ranks) override;
  std::optional<TimeoutError> timed_out(ErrorContext context) const override;
  void send_fd(int peer, const std::string& name, int fd) override;
  Fd receive_fd(int peer,
                const std::string& name,
                std::chrono::milliseconds timeout) override;
  std::optional<PeerLost> peer_lost(const std::vector<int>& waiting_for,
                                    ErrorContext context) const override;

 private:
  [[nodiscard]] int in_whole(int rank) const;
  [[nodiscard]] std::vector<int> in_whole(std::vector<int> ranks) const;

  const std::shared_ptr<Liveness> whole_;
  const std::vector<int> ranks_;  ///< of the whole
  const std::vector<int> all_;    ///< 0, 1, ...
  int rank_ = 0;
  uint64_t subscription_;
};

}  // namespace lockstep::comm::liveness
