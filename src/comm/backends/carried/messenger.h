#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/first_failure.h"
#include "comm/p2p/exchange.h"
#include "comm/p2p/transfer.h"

namespace lockstep::comm {
class Liveness;
}

namespace lockstep::comm::carried {

/// Sends and receives with those of another backend, the carrier, whose own may
/// end the process where sizes differ, and tell of progress only who waits. The
/// frames of an Exchange go as messages of one channel, up to 64 KB of a
/// message along; what is longer follows as one message of another channel
/// straight into its tensor, for which the receiver has posted before it
/// granted.
///
/// A message of up to 64 KB takes one way; a longer one there, back and there
/// again, as with Gloo where the receive comes late; the sender knows one way
/// later.
///
/// For each peer that this rank has sent to or received from there is a thread
/// that takes its frames in; one more watches the deadlines.
class CarriedMessenger final : public p2p::Messenger {
 public:
  /// `liveness` may be null. `failure` learns of transfers that end with an
  /// error. `exact_sizes`: as in make_carried_backend; then all frames have one
  /// size, and up to 4 KB come along.
  CarriedMessenger(c10::intrusive_ptr<c10d::Backend> carrier,
                   std::shared_ptr<Liveness> liveness,
                   std::shared_ptr<FirstFailure> failure,
                   bool exact_sizes);
  ~CarriedMessenger() override;

  void start(const p2p::TransferPtr& transfer) override;
  void run(const p2p::TransferPtr& transfer) override;
  void wait(const p2p::Transfer& transfer,
            std::chrono::milliseconds limit) override;

  /// Ends receives that have met no message, returns when everything else has
  /// ended and was told to the peers, and lets go of the carrier.
  void finish();
  /// Ends everything with a BackendError that tells `reason`, and lets go
  /// of the carrier.
  void abort(const std::string& reason);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// A frame as it is sent, its payload right behind.
  struct Header {
    p2p::Frame frame;
    uint64_t received;  ///< frames that the sender has taken in from the peer
  };
  /// What the carrier reads from until the peer has taken the frame in.
  struct Sent {
    at::Tensor frame;
    p2p::TransferPtr data_of;
    std::vector<WorkPtr> works;
    bool refusal = false;  ///< of a message of the peer
  };
  struct Link {
    uint64_t received = 0;              ///< frames
    uint64_t retired = 0;               ///< frames that the peer has received
    std::deque<Sent> sent;              ///< the others
    std::map<uint64_t, WorkPtr> rests;  ///< to come, by message
    WorkPtr listening;
    WorkPtr arriving;  ///< the rest whose frame has come
    /// After an error: what the peer says and expects is not known any more.
    bool closed = false;
    std::optional<Deadline> verdict_by;  ///< once the connection is lost
    std::optional<Deadline> heard_by;    ///< once the peer has left
    std::string loss;                    ///< the carrier's own text
    std::thread thread;
  };

  [[nodiscard]] int global_rank(int rank) const;
  void post(const p2p::TransferPtr& transfer);
  void open(int peer);
  void listen(int peer);
  /// Lets go of the lock while the rest of a message is under way.
  void take_in(int peer, const at::Tensor& bytes, Lock& lock);
  /// Sends all frames that are due; ends a turn.
  void flush(Lock& lock);
  void send(int peer, const p2p::Exchange::Outgoing& outgoing);
  void lose(int peer, const char* reason);
  void watch();
  void end_what_is_due();
  /// Of peers that left: whether what they said before may be under way.
  bool may_still_come(const p2p::Transfer& transfer);
  void end_with(int peer, const std::string& reason);
  /// Whether a peer that is there may not know yet that its message was
  /// refused.
  [[nodiscard]] bool is_refusal_unheard() const;
  void let_go(Lock& lock);

  const int rank_;
  const int size_;
  const bool exact_sizes_;
  const size_t payload_;  ///< most bytes that come along with a frame
  const std::shared_ptr<Liveness> liveness_;
  uint64_t subscription_ = 0;

  std::mutex mutex_;               ///< all below
  std::condition_variable ended_;  ///< some transfers
  std::condition_variable due_;    ///< something for the watcher
  c10::intrusive_ptr<c10d::Backend> carrier_;
  p2p::Exchange exchange_;
  std::vector<std::unique_ptr<Link>> links_;  ///< by rank; null: not in use
  bool watcher_rests_ = false;                ///< until something is pending
  bool finishing_ = false;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace lockstep::comm::carried
