#include "comm/backends/shm/p2p/messenger.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <map>

#include "comm/liveness.h"
#include "comm/p2p/verdicts.h"
#include "core/block_signals.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;

/// Longest sleep while something is pending, whose deadline may be new.
constexpr std::chrono::milliseconds kNap = 500ms;

/// How long the last words to peers may take to find room.
constexpr std::chrono::milliseconds kLastWords = 1s;

/// So many turns at a time at most, then deadlines are looked at.
constexpr int kTurns = 10'000;

}  // namespace

RingMessenger::RingMessenger(std::shared_ptr<Liveness> liveness,
                             const std::string& group,
                             std::chrono::milliseconds timeout,
                             std::shared_ptr<FirstFailure> failure)
    : liveness_(std::move(liveness)),
      rank_(liveness_->rank()),
      size_(liveness_->world_size()),
      layout_(size_),
      segment_(share_one(*liveness_,
                         "shm/p2p/" + group,
                         layout_.bytes(),
                         timeout,
                         Segment::Pages::kOnDemand)),
      patience_(patience(*liveness_)),
      exchange_(
          rank_,
          size_,
          {.of_offer = Ring::kPayload, .of_data = Ring::kPayload},
          [liveness = liveness_.get()](int rank) {
            return liveness->global_rank(rank);
          },
          [this,
           failure = std::move(failure)](const std::exception_ptr& error) {
            finishing_ ? p2p::warn(error) : failure->note(error);
          }),
      linked_(static_cast<size_t>(size_)) {
  segment_->reserve(0, layout_.start_bytes());
  subscription_ = liveness_->subscribe([this] { ring_always(bell()); });
}

RingMessenger::~RingMessenger() {
  finish();
  liveness_->unsubscribe(subscription_);
}

RingLayout::Control& RingMessenger::control(int rank) const {
  return *reinterpret_cast<RingLayout::Control*>(segment_->data() +
                                                 layout_.control(rank));
}

std::atomic<uint8_t>& RingMessenger::in_use(int peer) const {
  return *reinterpret_cast<std::atomic<uint8_t>*>(segment_->data() +
                                                  layout_.in_use(rank_, peer));
}

RingMessenger::Lock RingMessenger::enter() {
  entering_.fetch_add(1, std::memory_order_relaxed);
  Lock lock(mutex_);
  entering_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

void RingMessenger::link(int peer) {
  const auto ring = [&](int from, int to) -> Ring& {
    return *reinterpret_cast<Ring*>(segment_->data() + layout_.ring(from, to));
  };
  links_.push_back(
      {peer, RingReader(ring(peer, rank_)), RingWriter(ring(rank_, peer))});
  linked_[static_cast<size_t>(peer)] = true;
}

void RingMessenger::open(int peer) {
  if (linked_[static_cast<size_t>(peer)]) return;
  segment_->reserve(layout_.pair(rank_, peer), RingLayout::kPairBytes);
  in_use(peer).store(1, std::memory_order_release);
  control(peer).opened.fetch_add(1, std::memory_order_release);
  link(peer);
}

void RingMessenger::find_opened() {
  const uint32_t opened = control(rank_).opened.load(std::memory_order_acquire);
  if (opened == opened_) return;
  opened_ = opened;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || linked_[static_cast<size_t>(peer)]) continue;
    if (in_use(peer).load(std::memory_order_acquire) != 0) link(peer);
  }
}

bool RingMessenger::take_turn() {
  const size_t pending = exchange_.pending();
  find_opened();
  bool moved = false;
  for (auto& link : links_) moved |= take_turn(link);
  if (exchange_.pending() < pending) wake_waiters();
  return moved;
}

bool RingMessenger::take_turn(Link& link) {
  auto& peer_bell = control(link.peer).bell;
  bool moved = false;
  // No more than the ring holds: the peer may write as fast as this reads.
  for (size_t i = 0; i < Ring::kEntries; ++i) {
    const auto* entry = link.in.front();
    if (entry == nullptr) break;
    exchange_.accept(link.peer, entry->frame, entry->payload);
    link.in.take();
    moved = true;
  }
  if (moved) ring(peer_bell);
  // The same here; who takes what was written rings for another turn.
  for (size_t i = 0; i < Ring::kEntries && link.out.has_room(); ++i) {
    const auto outgoing = exchange_.next(link.peer);
    if (!outgoing) break;
    link.out.write(outgoing->frame, outgoing->payload);
    ring(peer_bell);
    moved = true;
  }
  return moved;
}

void RingMessenger::wake_waiters() {
  if (sleepers_ > 0) ring_always(bell());
}

void RingMessenger::end_what_is_due() {
  const size_t pending = exchange_.pending();
  if (liveness_->disturbed()) {
    // What a peer completed before it went counts: all of it is there once the
    // peer is known to be gone.
    std::map<const p2p::Transfer*, std::exception_ptr> lost;
    exchange_.end_where([&](const p2p::Transfer& transfer) {
      if (auto error = p2p::loss(transfer, *liveness_)) {
        lost.emplace(&transfer, std::move(error));
      }
      return std::exception_ptr();
    });
    take_turn();
    exchange_.end_where([&](const p2p::Transfer& transfer) {
      const auto found = lost.find(&transfer);
      return found == lost.end() ? nullptr : found->second;
    });
  }
  if (exchange_.until_due() == 0ms) {
    exchange_.end_where([&](const p2p::Transfer& transfer) {
      return p2p::lateness(transfer, rank_, size_, [&](int rank) {
        return liveness_->global_rank(rank);
      });
    });
  }
  if (exchange_.pending() < pending) wake_waiters();
}

void RingMessenger::fall_silent() {
  if (turning_ > 0 || exchange_.idle()) return;
  announce_sleep(bell());
  take_turn();
}

template <class Done>
bool RingMessenger::take_turns(Lock& lock, Done done) {
  ++turning_;
  bell().sleeping.store(0, std::memory_order_relaxed);
  const int looks = patience_.spins + patience_.yields;
  int idle = 0;
  for (int turn = 0; turn < kTurns && idle < looks && !done(); ++turn) {
    idle = take_turn() ? 0 : idle + 1;
    lock.unlock();
    if (entering_.load(std::memory_order_relaxed) > 0 ||
        idle > patience_.spins) {
      ::sched_yield();
    } else if (idle > 0) {
      pause();
    }
    lock.lock();
  }
  --turning_;
  return idle >= looks;
}

template <class Done>
void RingMessenger::sleep(Lock& lock,
                          std::chrono::milliseconds limit,
                          Done done) {
  const uint32_t seen = bell().rings.load(std::memory_order_acquire);
  fall_silent();
  complete_futures(lock);
  if (done()) return;
  ++sleepers_;
  const auto nap = std::min({limit, exchange_.until_due(), kNap});
  lock.unlock();
  sleep_until_rung(bell(), seen, nap);
  lock.lock();
  --sleepers_;
}

template <class Done>
void RingMessenger::run_until(Lock& lock, const Deadline& deadline, Done done) {
  while (!done()) {
    const bool idle = take_turns(lock, done);
    if (done()) break;
    end_what_is_due();
    if (done() || deadline.passed()) break;
    if (idle) sleep(lock, deadline.remaining(), done);
  }
  fall_silent();
  if (!exchange_.idle()) wake_thread();
  complete_futures(lock);
}

void RingMessenger::complete_futures(Lock& lock) {
  const auto transfers = exchange_.take_futures();
  if (transfers.empty()) return;
  lock.unlock();
  for (const auto& transfer : transfers) transfer->complete_future();
  lock.lock();
}

void RingMessenger::post(const p2p::TransferPtr& transfer) {
  if (finishing_) {
    throw InvalidArgument(
        "the group was destroyed; call init_process_group again",
        transfer->context());
  }
  const size_t pending = exchange_.pending();
  if (transfer->direction() == p2p::Direction::kReceive) {
    exchange_.receive(transfer);
  } else {
    const int peer = *transfer->peer();
    if (peer != rank_) open(peer);
    exchange_.send(transfer);
  }
  // A message to the own rank ends at once, for another thread perhaps.
  if (exchange_.pending() <= pending) wake_waiters();
}

void RingMessenger::start(const p2p::TransferPtr& transfer) {
  Lock lock = enter();
  post(transfer);
  if (turning_ > 0) {
    take_turn();
  } else {
    fall_silent();
  }
  if (!exchange_.idle()) wake_thread();
  complete_futures(lock);
}

void RingMessenger::run(const p2p::TransferPtr& transfer) {
  Lock lock = enter();
  post(transfer);
  run_until(lock, Deadline(kLongestWait), [&] { return transfer->ended(); });
}

void RingMessenger::wait(const p2p::Transfer& transfer,
                         std::chrono::milliseconds limit) {
  Lock lock = enter();
  run_until(lock, Deadline(limit > kNoTimeout ? limit : kLongestWait), [&] {
    return transfer.ended();
  });
}

void RingMessenger::wake_thread() {
  if (!thread_.joinable()) {
    if (finishing_) return;
    const BlockSignals block;
    thread_ = std::thread([this] { work(); });
    ::pthread_setname_np(thread_.native_handle(), "lockstep-p2p");
  } else if (rests_) {
    ring_always(bell());
  }
}

void RingMessenger::work() {
  Lock lock(mutex_);
  while (!finishing_ || exchange_.pending() > 0) {
    if (exchange_.idle()) {
      rests_ = true;
      bell().sleeping.store(0, std::memory_order_relaxed);
      const uint32_t seen = bell().rings.load(std::memory_order_acquire);
      lock.unlock();
      sleep_until_rung(bell(), seen, kLongestWait);
      lock.lock();
      rests_ = false;
      continue;
    }
    // While data flows, a wake-up for each piece of it would take too long.
    if (turning_ == 0) take_turns(lock, [&] { return !exchange_.flowing(); });
    end_what_is_due();
    sleep(lock, kNap, [&] { return exchange_.idle(); });
  }
}

void RingMessenger::finish() {
  {
    Lock lock = enter();
    finishing_ = true;
    take_turn();  // what came before counts
    exchange_.end_unmet_receives([](const p2p::Transfer& transfer) {
      return std::make_exception_ptr(BackendError(
          "the group was destroyed before a message came; wait for every "
          "receive before destroy_process_group",
          transfer.context()));
    });
    wake_waiters();
    run_until(
        lock, Deadline(kLongestWait), [&] { return exchange_.pending() == 0; });
    // Of peers that are gone nobody takes the last words.
    run_until(lock, Deadline(kLastWords), [&] { return exchange_.idle(); });
    ring_always(bell());
  }
  if (thread_.joinable()) thread_.join();
}

void RingMessenger::abort() {
  Lock lock = enter();
  exchange_.end_where([](const p2p::Transfer& transfer) {
    return std::make_exception_ptr(
        BackendError("the group was aborted", transfer.context()));
  });
  wake_waiters();
  complete_futures(lock);
}

}  // namespace lockstep::comm::shm
