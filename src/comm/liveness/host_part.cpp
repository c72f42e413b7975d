#include "comm/liveness/host_part.h"

#include <algorithm>
#include <numeric>

namespace lockstep::comm::liveness {
namespace {

std::vector<int> numbers(size_t n) {
  std::vector<int> result(n);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

}  // namespace

HostPart::HostPart(std::shared_ptr<Liveness> whole)
    : whole_(std::move(whole)),
      ranks_(whole_->host_ranks()),
      all_(numbers(ranks_.size())) {
  be_part_of(*whole_, ranks_);
  const auto own = std::find(ranks_.begin(), ranks_.end(), whole_->rank());
  rank_ = static_cast<int>(own - ranks_.begin());
  subscription_ = subscribe([] {});
}

HostPart::~HostPart() {
  unsubscribe(subscription_);
}

int HostPart::in_whole(int rank) const {
  return ranks_.at(static_cast<size_t>(rank));
}

std::vector<int> HostPart::in_whole(std::vector<int> ranks) const {
  for (int& rank : ranks) rank = in_whole(rank);
  return ranks;
}

std::optional<PeerFailure> HostPart::failure() const {
  auto failure = whole_->failure();
  if (!failure) return failure;
  const auto found = std::find(ranks_.begin(), ranks_.end(), failure->rank);
  failure->rank =
      found == ranks_.end() ? -1 : static_cast<int>(found - ranks_.begin());
  return failure;
}

bool HostPart::has_left(int rank) const {
  return whole_->has_left(in_whole(rank));
}

uint64_t HostPart::subscribe(std::function<void()> callback) {
  return whole_->subscribe([this, callback = std::move(callback)] {
    disturbed_.store(true, std::memory_order_release);
    callback();
  });
}

void HostPart::unsubscribe(uint64_t id) {
  whole_->unsubscribe(id);
}

void HostPart::announce_failure(const std::string& reason,
                                std::optional<int> culprit) {
  if (culprit) culprit = in_whole(*culprit);
  whole_->announce_failure(reason, culprit);
}

std::vector<std::optional<uint64_t>> HostPart::ask_progress(
    std::chrono::milliseconds limit) {
  const auto all = whole_->ask_progress(limit);
  std::vector<std::optional<uint64_t>> result;
  for (const int rank : ranks_) {
    result.push_back(all.at(static_cast<size_t>(rank)));
  }
  return result;
}

void HostPart::announce_timeout(const std::vector<int>& ranks) {
  whole_->announce_timeout(in_whole(ranks));
}

std::optional<TimeoutError> HostPart::timed_out(ErrorContext context) const {
  return whole_->timed_out(std::move(context));
}

void HostPart::send_fd(int peer, const std::string& name, int fd) {
  whole_->send_fd(in_whole(peer), name, fd);
}

Fd HostPart::receive_fd(int peer,
                        const std::string& name,
                        std::chrono::milliseconds timeout) {
  return whole_->receive_fd(in_whole(peer), name, timeout);
}

std::optional<PeerLost> HostPart::peer_lost(const std::vector<int>& waiting_for,
                                            ErrorContext context) const {
  return whole_->peer_lost(in_whole(waiting_for), std::move(context));
}

}  // namespace lockstep::comm::liveness
