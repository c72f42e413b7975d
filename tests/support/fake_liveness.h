#pragma once

#include <fcntl.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "comm/liveness.h"
#include "comm/liveness/cores.h"
#include "core/clock.h"

namespace lockstep::test {

/// One host whose ranks are threads: hands descriptors around, and loses ranks
/// when a test says so.
class FakeHost : public std::enable_shared_from_this<FakeHost> {
 public:
  /// By default with the cores that this machine lets the process use.
  static std::shared_ptr<FakeHost> make(
      int ranks,
      int cores =
          comm::liveness::count_together({comm::liveness::own_cores()})) {
    return std::shared_ptr<FakeHost>(new FakeHost(ranks, cores));
  }

  std::shared_ptr<comm::Liveness> liveness(int rank);

  /// From now on `rank` counts as dead.
  void kill(int rank) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = comm::PeerFailure{rank, 4711, "here", ""};
    }
    disturb();
  }

  void leave(int rank) {
    {
      const std::lock_guard lock(mutex_);
      left_.insert(rank);
    }
    disturb();
  }

 private:
  class Member;
  FakeHost(int ranks, int cores) : size_(ranks), cores_(cores) {
    for (int r = 0; r < ranks; ++r) ranks_.push_back(r);
  }
  void disturb();

  int size_;
  int cores_;
  std::vector<int> ranks_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::tuple<int, int, std::string>, Fd> descriptors_;
  std::optional<comm::PeerFailure> failure_;
  std::set<int> left_;
  std::vector<Member*> members_;
};

class FakeHost::Member final : public comm::Liveness {
 public:
  Member(std::shared_ptr<FakeHost> host, int rank)
      : host_(std::move(host)), rank_(rank) {
    const std::lock_guard lock(host_->mutex_);
    host_->members_.push_back(this);
  }
  ~Member() override {
    const std::lock_guard lock(host_->mutex_);
    std::erase(host_->members_, this);
  }

  void disturb() {
    const std::lock_guard lock(callbacks_mutex_);
    disturbed_.store(true);
    for (const auto& [id, callback] : callbacks_) callback();
  }

  const std::vector<int>& host_ranks() const override { return host_->ranks_; }
  int host_cores() const override { return host_->cores_; }
  int rank() const override { return rank_; }
  int world_size() const override { return host_->size_; }
  std::optional<comm::PeerFailure> failure() const override {
    const std::lock_guard lock(host_->mutex_);
    return host_->failure_;
  }
  bool has_left(int rank) const override {
    const std::lock_guard lock(host_->mutex_);
    return host_->left_.contains(rank);
  }
  uint64_t subscribe(std::function<void()> callback) override {
    const std::lock_guard lock(callbacks_mutex_);
    if (disturbed()) callback();
    callbacks_[++last_id_] = std::move(callback);
    return last_id_;
  }
  void unsubscribe(uint64_t id) override {
    const std::lock_guard lock(callbacks_mutex_);
    callbacks_.erase(id);
  }
  void announce_failure(const std::string& /*reason*/,
                        std::optional<int> culprit) override {
    host_->kill(culprit.value_or(rank_));
  }
  void leave() noexcept override { host_->leave(rank_); }

  std::vector<std::optional<uint64_t>> ask_progress(
      std::chrono::milliseconds /*limit*/) override {
    return std::vector<std::optional<uint64_t>>(
        static_cast<size_t>(host_->size_), 0);
  }
  void announce_timeout(const std::vector<int>& /*ranks*/) override {}
  std::optional<TimeoutError> timed_out(
      ErrorContext /*context*/) const override {
    return std::nullopt;
  }

  void send_fd(int peer, const std::string& name, int fd) override {
    const std::lock_guard lock(host_->mutex_);
    host_->descriptors_[{rank_, peer, name}] =
        Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    host_->changed_.notify_all();
  }
  Fd receive_fd(int peer,
                const std::string& name,
                std::chrono::milliseconds timeout) override {
    std::unique_lock lock(host_->mutex_);
    const std::tuple key(peer, rank_, name);
    if (!host_->changed_.wait_for(
            lock, timeout, [&] { return host_->descriptors_.contains(key); })) {
      throw TimeoutError("no descriptor " + name, {.peers = {peer}});
    }
    return std::move(host_->descriptors_.extract(key).mapped());
  }

  std::optional<PeerLost> peer_lost(const std::vector<int>& waiting_for,
                                    ErrorContext context) const override {
    const std::lock_guard lock(host_->mutex_);
    if (host_->failure_) {
      context.peers = {host_->failure_->rank};
      return PeerLost("rank " + std::to_string(host_->failure_->rank) + " died",
                      context);
    }
    for (const int rank : waiting_for) {
      if (!host_->left_.contains(rank)) continue;
      context.peers = {rank};
      return PeerLost("rank " + std::to_string(rank) + " left", context);
    }
    return std::nullopt;
  }

 private:
  std::shared_ptr<FakeHost> host_;
  int rank_;
  std::mutex callbacks_mutex_;
  std::map<uint64_t, std::function<void()>> callbacks_;
  uint64_t last_id_ = 0;
};

inline std::shared_ptr<comm::Liveness> FakeHost::liveness(int rank) {
  return std::make_shared<Member>(shared_from_this(), rank);
}

inline void FakeHost::disturb() {
  const std::lock_guard lock(mutex_);
  for (auto* member : members_) member->disturb();
}

}  // namespace lockstep::test
