#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/shm/p2p/rings.h"
#include "comm/backends/shm/segment.h"
#include "comm/first_failure.h"
#include "comm/p2p/exchange.h"
#include "comm/p2p/transfer.h"

namespace lockstep::comm {
class Liveness;
}

namespace lockstep::comm::shm {

/// Sends and receives between the ranks of one host, through a pair of rings
/// between two ranks each (rings.h), which carry the frames of an Exchange.
///
/// Everything moves when some thread of the rank takes a turn: it takes all
/// frames that have come in and writes those that there is room for, under one
/// mutex. A thread that waits for a transfer takes turns itself, as long as its
/// patience lasts. When none does so and something is pending, the rank's bell
/// says that it sleeps; then whoever writes or takes a frame rings, and the
/// threads that sleep on the bell go on: those that wait, and one of the
/// messenger's own, which starts with the first transfer and sees to it that
/// everything ends without the caller's help. Collectives have another bell,
/// another segment and another order.
///
/// No wake-up is lost: the count of rings is read before `sleeping` is stored,
/// a full fence later a last turn looks at all rings; a peer stores its frame
/// with release order, and looks at `sleeping` behind a full fence.
class RingMessenger final : public p2p::Messenger {
 public:
  /// Collective over all ranks, which share this host. `failure` learns of
  /// transfers that end with an error. Throws PeerLost, TimeoutError,
  /// BackendError.
  RingMessenger(std::shared_ptr<Liveness> liveness,
                const std::string& group,
                std::chrono::milliseconds timeout,
                std::shared_ptr<FirstFailure> failure);
  ~RingMessenger() override;

  void start(const p2p::TransferPtr& transfer) override;
  void run(const p2p::TransferPtr& transfer) override;
  void wait(const p2p::Transfer& transfer,
            std::chrono::milliseconds limit) override;

  /// Ends receives that have met no message, returns when everything else has
  /// ended.
  void finish();
  /// Ends everything with BackendError.
  void abort();

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Link {
    int peer;
    RingReader in;
    RingWriter out;
  };

  [[nodiscard]] RingLayout::Control& control(int rank) const;
  [[nodiscard]] Doorbell& bell() const { return control(rank_).bell; }
  [[nodiscard]] std::atomic<uint8_t>& in_use(int peer) const;

  /// Takes the mutex; threads that take turns let the caller in soon.
  Lock enter();
  void link(int peer);
  /// Reserves the rings that are shared with the peer.
  void open(int peer);
  /// Those that peers have opened.
  void find_opened();
  void post(const p2p::TransferPtr& transfer);
  /// Whether anything moved.
  bool take_turn();
  bool take_turn(Link& link);
  /// Takes turns as long as something moves or patience lasts, until `done`.
  /// Whether patience has ended.
  template <class Done>
  bool take_turns(Lock& lock, Done done);
  /// Sleeps until something may have come, unless `done` holds.
  template <class Done>
  void sleep(Lock& lock, std::chrono::milliseconds limit, Done done);
  template <class Done>
  void run_until(Lock& lock, const Deadline& deadline, Done done);
  void end_what_is_due();
  /// Makes peers ring when nobody takes turns any more.
  void fall_silent();
  void wake_waiters();
  /// The own thread, which is started where there is none.
  void wake_thread();
  void complete_futures(Lock& lock);
  void work();

  const std::shared_ptr<Liveness> liveness_;
  const int rank_;
  const int size_;
  const RingLayout layout_;
  const std::shared_ptr<Segment> segment_;
  const Patience patience_;
  uint64_t subscription_ = 0;

  std::atomic<int> entering_{0};  ///< threads that wait for the mutex
  std::mutex mutex_;              ///< all below
  p2p::Exchange exchange_;
  std::vector<Link> links_;
  std::vector<bool> linked_;  ///< by rank
  uint32_t opened_ = 0;
  int turning_ = 0;     ///< threads that take turns
  int sleepers_ = 0;    ///< threads that sleep until something comes
  bool rests_ = false;  ///< the own thread, until something is pending
  bool finishing_ = false;
  std::thread thread_;
};

}  // namespace lockstep::comm::shm
