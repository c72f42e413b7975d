#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "comm/fingerprint.h"
#include "comm/p2p/frame.h"
#include "comm/p2p/transfer.h"

namespace lockstep::comm::p2p {

/// The messages between one rank and all others, whatever carries their frames:
/// which receive takes which message, and what is to be said to whom.
///
/// A message begins with its sender's offer, which brings the first bytes
/// along. Offers to one peer come in the order of the sends, so messages of one
/// tag keep it. The receiver takes the first receive posted that fits by tag
/// and source. It then has all bytes and says so (taken), or grants the sender
/// to send the rest (data), or refuses elements of another kind or number,
/// which is an error on both sides. Where no receive fits yet the offer waits,
/// with its bytes as long as these are few, else without: then the grant asks
/// for them again. So nothing but offers ever waits for a receive, data always
/// has a place to go, no message stops another one, and a send has ended only
/// when the receiver has all of it.
///
/// Not thread safe.
class Exchange {
 public:
  /// `payload`: the most bytes that come along with an offer, and with data.
  struct Payload {
    size_t of_offer;
    size_t of_data;
  };
  struct Outgoing {
    Frame frame;
    const char* payload;  ///< `frame.bytes` bytes, until the transfer ended
  };
  /// Where the rest of a granted message belongs.
  struct Rest {
    char* data;
    size_t bytes;
  };
  /// The error to end a transfer with, if it is to end.
  using Verdict = std::function<std::exception_ptr(const Transfer&)>;

  /// `global_rank`: how errors name ranks. `on_error` is called with each error
  /// that a transfer ends with.
  Exchange(int rank,
           int size,
           Payload payload,
           GlobalRank global_rank,
           std::function<void(const std::exception_ptr&)> on_error);

  void send(const TransferPtr& transfer);
  void receive(const TransferPtr& transfer);

  /// The next frame for the peer, which counts as sent.
  std::optional<Outgoing> next(int peer);
  /// A frame from the peer. Of data, `payload` may be its place itself.
  void accept(int peer, const Frame& frame, const char* payload);
  /// Of a message that this rank has granted; none when it was given up.
  [[nodiscard]] Rest rest_of(int peer, uint64_t message) const;
  /// Its receive; null when it was given up.
  [[nodiscard]] TransferPtr receive_of(int peer, uint64_t message) const;
  /// The send of a message to the peer; null when it was given up.
  [[nodiscard]] TransferPtr send_of(int peer, uint64_t message) const;

  /// Transfers that have not ended.
  [[nodiscard]] size_t pending() const { return pending_; }
  /// Whether nothing is left to do, not even to be said.
  [[nodiscard]] bool idle() const { return pending_ == 0 && unsaid_ == 0; }
  /// Whether data of some message is under way.
  [[nodiscard]] bool flowing() const { return flowing_ > 0; }
  /// Until the first of the pending transfers is due.
  [[nodiscard]] std::chrono::milliseconds until_due() const;
  /// Ends the transfers for which there is an error.
  void end_where(const Verdict& verdict);
  /// The same for receives that have met no message.
  void end_unmet_receives(const Verdict& verdict);

  /// Transfers that ended since the last call and whose futures must be
  /// completed.
  std::vector<TransferPtr> take_futures() {
    return std::exchange(futures_, {});
  }

 private:
  struct Send {
    TransferPtr transfer;
    size_t sent = 0;
    bool granted = false;
  };
  struct Receive {
    TransferPtr transfer;
    size_t received = 0;
  };
  struct Peer {
    uint64_t messages = 0;           ///< sent so far
    std::map<uint64_t, Send> sends;  ///< not ended
    std::deque<uint64_t> to_offer;
    std::deque<uint64_t> granted;
    std::map<uint64_t, Receive> receives;  ///< granted
    std::deque<Frame> replies;
  };
  struct Offer {
    int peer;
    Frame frame;
    std::vector<char> kept;  ///< its first bytes
  };

  void reply(Peer& peer, const Frame& frame);
  void arrive(int peer, const Frame& offer, const char* payload);
  void meet(int peer,
            const Frame& offer,
            const char* payload,
            const TransferPtr& transfer);
  void grant(Peer& peer, const Frame& frame);
  void write(Peer& peer, const Frame& frame, const char* payload);
  void finish_send(Peer& peer, uint64_t message, std::exception_ptr error);
  void end(const TransferPtr& transfer, std::exception_ptr error);
  [[nodiscard]] std::exception_ptr mismatch(const Transfer& own,
                                            int sender,
                                            int receiver,
                                            const Frame& sent,
                                            const Frame& expected) const;

  const int rank_;
  const Payload payload_;
  const GlobalRank global_rank_;
  const std::function<void(const std::exception_ptr&)> on_error_;
  std::vector<Peer> peers_;
  std::list<TransferPtr> posted_;  ///< receives that have met no message
  std::list<Offer> offers_;        ///< messages that have met no receive
  size_t kept_bytes_ = 0;
  size_t pending_ = 0;
  size_t unsaid_ = 0;  ///< replies of all peers
  size_t flowing_ = 0;
  std::vector<TransferPtr> futures_;
};

}  // namespace lockstep::comm::p2p
