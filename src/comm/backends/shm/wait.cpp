#include "comm/backends/shm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <string>

#include "comm/liveness.h"

namespace lockstep::comm::shm {
namespace {

// 20 to 100 us, by the processor's pause.
constexpr int kSpins = 2000;
// With more ranks than cores the awaited one needs this core.
constexpr int kSpinsCrowded = 20;
constexpr int kYieldsCrowded = 20;

// Not the PRIVATE operations: the word is shared between processes.
void futex_wake(std::atomic<uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_wait(std::atomic<uint32_t>& word,
                uint32_t seen,
                std::chrono::milliseconds timeout) noexcept {
  const auto ms = timeout.count();
  const timespec limit{static_cast<time_t>(ms / 1000),
                       static_cast<long>(ms % 1000 * 1'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

/// Orders a store before a later load of another word. ThreadSanitizer does
/// not know fences; it needs none here, since data is published by the caller's
/// release store.
void full_fence() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

void ring(Doorbell& bell) noexcept {
  // Against a lost wake-up: we store the change, then load `sleeping`; the
  // sleeper stores `sleeping`, then looks for the change. With a full fence
  // between the two on both sides at least one of them sees the other.
  full_fence();
  if (bell.sleeping.load(std::memory_order_relaxed) != 0) ring_always(bell);
}

void ring_always(Doorbell& bell) noexcept {
  bell.rings.fetch_add(1, std::memory_order_release);
  futex_wake(bell.rings);
}

void announce_sleep(Doorbell& bell) noexcept {
  bell.sleeping.store(1, std::memory_order_relaxed);
  full_fence();
}

void sleep_until_rung(Doorbell& bell,
                      uint32_t seen,
                      std::chrono::milliseconds limit) noexcept {
  futex_wait(bell.rings, seen, limit);
}

Patience patience(const Liveness& liveness) {
  return liveness.is_crowded() ? Patience{kSpinsCrowded, kYieldsCrowded}
                               : Patience{kSpins, 0};
}

Waiter::Waiter(Doorbell& bell, std::shared_ptr<Liveness> liveness)
    : bell_(bell),
      liveness_(std::move(liveness)),
      patience_(patience(*liveness_)),
      subscription_(liveness_->subscribe([this] { ring_always(bell_); })) {
}

Waiter::~Waiter() {
  liveness_->unsubscribe(subscription_);
}

void Waiter::wait_slowly(const std::function<bool()>& ready,
                         std::chrono::milliseconds timeout,
                         const std::function<std::vector<int>()>& missing,
                         const std::function<ErrorContext()>& context) {
  for (int i = 0; i < patience_.yields; ++i) {
    if (ready()) return;
    ::sched_yield();
  }
  const Deadline deadline(timeout);
  const auto failure_context = [&](const std::vector<int>& peers) {
    ErrorContext filled = context();
    filled.peers = liveness_->global_ranks(peers);
    filled.elapsed = deadline.elapsed();
    return filled;
  };
  while (true) {
    // Read before the conditions are: a ring after this ends the futex wait.
    const uint32_t seen = bell_.rings.load(std::memory_order_acquire);
    announce_sleep(bell_);
    const bool late = deadline.passed();
    std::optional<PeerLost> lost;
    std::optional<TimeoutError> timed_out;
    if (liveness_->disturbed()) {
      const auto peers = missing();
      // First: who gave up may have left since.
      timed_out = liveness_->timed_out(failure_context(peers));
      lost = liveness_->peer_lost(peers, failure_context(peers));
    }
    // After the failure was seen: what a peer completed before it went counts.
    const bool done = ready();
    if (!done && !late && !lost && !timed_out) {
      sleep_until_rung(bell_, seen, deadline.remaining());
    }
    bell_.sleeping.store(0, std::memory_order_relaxed);
    if (done) return;
    if (timed_out) throw *timed_out;
    if (lost) throw *lost;
    if (late) {
      const auto peers = missing();
      throw TimeoutError(list(liveness_->global_ranks(peers)) +
                             " did not arrive within " +
                             std::to_string(timeout.count()) +
                             " ms; look there for a rank that is stopped, "
                             "slower or in other code, or raise the timeout",
                         failure_context(peers));
    }
  }
}

}  // namespace lockstep::comm::shm
