#include "comm/backends/shm/channel.h"

#include "comm/fingerprint.h"
#include "comm/liveness.h"

namespace lockstep::comm::shm {

Channel::Channel(std::shared_ptr<Liveness> liveness,
                 std::string group,
                 std::chrono::milliseconds timeout)
    : liveness_(std::move(liveness)),
      group_(std::move(group)),
      rank_(liveness_->rank()),
      size_(liveness_->world_size()),
      layout_(size_),
      segment_(
          share_one(*liveness_, "shm/" + group_, layout_.bytes(), timeout)),
      waiter_(control(rank_).bell, liveness_),
      timeout_(timeout) {
  step();
}

ErrorContext Channel::context() const {
  ErrorContext result = liveness_->error_context();
  result.operation = operation_;
  result.group = group_;
  result.backend = "shm";
  if (sequence_ > 0) result.sequence = sequence_;
  return result;
}

/// Raises the own flag and waits for the others'. Whoever sees all flags raised
/// at once was among the last and rings those who sleep; with sequentially
/// consistent flags at least one rank does.
template <class Flag>
void Channel::arrive(uint64_t value, Flag flag) {
  flag(rank_).store(value, std::memory_order_seq_cst);
  int next = 0;
  const auto all_arrived = [&] {
    while (next < size_ &&
           flag(next).load(std::memory_order_seq_cst) >= value) {
      ++next;
    }
    return next == size_;
  };
  if (all_arrived()) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) ring(control(peer).bell);
    }
    return;
  }
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int peer = 0; peer < size_; ++peer) {
      if (flag(peer).load(std::memory_order_acquire) < value) {
        ranks.push_back(peer);
      }
    }
    return ranks;
  };
  waiter_.wait(all_arrived, timeout_, missing, [&] { return context(); });
}

void Channel::begin(const Fingerprint& fingerprint,
                    std::chrono::milliseconds timeout) {
  ++sequence_;
  operation_ = name(fingerprint.operation);
  timeout_ = timeout;
  const uint64_t turn = sequence_ % 2;
  control(rank_).announcements[turn].fingerprint = fingerprint;
  arrive(sequence_, [&](int rank) -> std::atomic<uint64_t>& {
    return control(rank).announcements[turn].sequence;
  });
  compare(fingerprint);
}

void Channel::step() {
  arrive(++steps_, [&](int rank) -> std::atomic<uint64_t>& {
    return control(rank).progress.steps;
  });
}

void Channel::compare(const Fingerprint& own) const {
  const auto of = [&](int rank) -> const Fingerprint& {
    return control(rank).announcements[sequence_ % 2].fingerprint;
  };
  bool equal = true;
  for (int peer = 0; peer < size_; ++peer) equal &= of(peer) == own;
  if (equal) return;
  // All ranks see the same announcements and name the same pair.
  int other = 1;
  while (of(other) == of(0)) ++other;
  ErrorContext filled = context();
  filled.peers = {liveness_->global_rank(other)};
  const auto global_rank = [this](int rank) {
    return liveness_->global_rank(rank);
  };
  throw MismatchError(describe_mismatch(of(0), other, of(other), global_rank),
                      std::move(filled));
}

}  // namespace lockstep::comm::shm
