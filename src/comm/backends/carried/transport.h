#pragma once

#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "core/clock.h"

namespace lockstep::comm::carried {

/// An exchange that did not come to its end. `what()` is the carrier's own
/// text.
struct ExchangeError : std::runtime_error {
  ExchangeError(const std::string& text, std::vector<int> missing_ranks)
      : runtime_error(text), missing(std::move(missing_ranks)) {}

  std::vector<int> missing;  ///< ranks whose messages are outstanding
};

/// Moves bytes between ranks with the send and recv of a backend, the carrier.
/// These, unlike collectives, can be woken at any time: `wait` of their works
/// returns false after `abort`, and the message goes on.
///
/// Thread safety: `interrupt` from any thread, the rest from one.
class Transport {
 public:
  struct Message {
    int peer;
    void* data;
    size_t bytes;
  };
  /// Messages of different channels never meet. The last two are the
  /// messenger's.
  enum Channel : int { kData, kControl, kFrames, kRests };

  explicit Transport(c10::intrusive_ptr<c10d::Backend> carrier)
      : carrier_(std::move(carrier)) {}

  /// Sends and receives at the same time; messages of no bytes are left out.
  /// Both ends of a message name the same size. `give_up` is asked at the
  /// start and after each `interrupt`. Throws ExchangeError; the transport can
  /// only be closed then.
  void exchange(Channel channel,
                const std::vector<Message>& receives,
                const std::vector<Message>& sends,
                const Deadline& deadline,
                const std::function<bool()>& give_up);

  /// Wakes a waiting `exchange` so that it asks `give_up`.
  void interrupt();

  /// All ranks are done with the carrier.
  void shutdown() { carrier_->shutdown(); }

  /// Closes all connections; peers that wait for this rank see it.
  void close();

 private:
  struct Pending {
    int peer;
    c10::intrusive_ptr<c10d::Work> work;  ///< null: could not be posted
  };

  c10::intrusive_ptr<c10d::Backend> carrier_;
  std::mutex mutex_;
  std::vector<Pending> pending_;
};

}  // namespace lockstep::comm::carried
