#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/clock.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
class Liveness;
}

namespace lockstep::comm::shm {

/// One per rank, in shared memory, in a cache line of its own. Whoever changes
/// something that the rank may wait for rings it. One thread waits at a time.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleeping{0};
};

/// Wakes the rank if it sleeps. Costs a fence and one load when it does not.
/// Call after the change was stored with release order.
void ring(Doorbell& bell) noexcept;

/// The same whether it sleeps or not.
void ring_always(Doorbell& bell) noexcept;

/// Says that the rank sleeps. Look for changes after it: who made one before
/// does not ring.
void announce_sleep(Doorbell& bell) noexcept;

/// Sleeps until a ring after `seen` were counted, at most for `limit`.
void sleep_until_rung(Doorbell& bell,
                      uint32_t seen,
                      std::chrono::milliseconds limit) noexcept;

/// How long to look for a change before sleeping: hardly at all when more ranks
/// than cores run, since the awaited one then needs this core.
struct Patience {
  int spins;   ///< with a `pause` after each look
  int yields;  ///< then, with a yield after each
};
Patience patience(const Liveness& liveness);

inline void pause() noexcept {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits on behalf of one rank: spins briefly (hardly at all when more ranks
/// than cores run), then sleeps on its doorbell by futex (not PRIVATE), so that
/// a peer in another process can wake it. Ends when the condition holds, a peer
/// failed, or the deadline passed; the condition is looked at once more after
/// a failure was seen, so what is complete is never reported as lost.
class Waiter {
 public:
  /// `bell` must outlive the waiter; `liveness` may not be null.
  Waiter(Doorbell& bell, std::shared_ptr<Liveness> liveness);
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  /// `ready()` is cheap and does not throw; it loads with acquire order.
  /// `missing()` tells which ranks have not arrived, for the message.
  /// `context()` fills the error, but for peers and elapsed time.
  /// Throws PeerLost, TimeoutError.
  template <class Ready, class Missing, class Context>
  void wait(Ready&& ready,
            std::chrono::milliseconds timeout,
            Missing&& missing,
            Context&& context) {
    for (int i = 0; i < patience_.spins; ++i) {
      if (ready()) return;
      pause();
    }
    wait_slowly(ready, timeout, missing, context);
  }

 private:
  void wait_slowly(const std::function<bool()>& ready,
                   std::chrono::milliseconds timeout,
                   const std::function<std::vector<int>()>& missing,
                   const std::function<ErrorContext()>& context);

  Doorbell& bell_;
  std::shared_ptr<Liveness> liveness_;
  Patience patience_;
  uint64_t subscription_;
};

}  // namespace lockstep::comm::shm
