#pragma once

#include <cstdint>
#include <string>

#include "core/fd.h"

namespace lockstep::comm::liveness {

/// What control connections carry.
enum class MessageType : uint32_t {
  Hello = 1,       ///< text: the receiver's secret; rank: the sender's
  Failure = 2,     ///< rank failed or died at `number`; text: its reason
  Left = 3,        ///< rank ends in good order, or as a consequence
  Descriptor = 4,  ///< text: its name; a descriptor is attached
  Ask = 5,         ///< rank wants to know how far all have come
  Progress = 6,    ///< rank has come to `number`; text: the rank that asked
  GaveUp = 7,      ///< rank waited for those in the text in vain
};

struct Message {
  MessageType type = MessageType::Hello;
  int rank = -1;
  int64_t number = 0;  ///< of a failure: nanoseconds of the wall clock
  std::string text = {};
};

/// One control connection, which it owns: messages over a stream socket.
///
/// Thread safety: one thread receives while another sends.
class Channel {
 public:
  /// Longer texts are refused on both sides.
  static constexpr size_t kMaxText = 16 * 1024;

  explicit Channel(Fd socket) : socket_(std::move(socket)) {}

  [[nodiscard]] int fd() const noexcept { return socket_.get(); }
  [[nodiscard]] bool is_open() const noexcept { return bool(socket_); }
  void close() noexcept { socket_.reset(); }

  /// Hands the message to the kernel; waits a moment when it has no room.
  /// False when the peer is gone or takes nothing.
  bool send(const Message& message, int descriptor = -1) noexcept;

  enum class Receipt { Message, Nothing, Closed };
  /// Takes the next message, without blocking. `Closed` also after bytes that
  /// are no message.
  Receipt receive(Message& message, Fd& descriptor);

 private:
  struct Header {
    uint32_t type;
    int32_t rank;
    int64_t number;
    uint64_t length;
  };

  /// Reads `size` bytes in all to `data`, of which `received_` are there.
  Receipt fill(char* data, size_t size);

  Fd socket_;
  Header header_{};
  bool have_header_ = false;
  size_t received_ = 0;
  std::string text_;
  Fd descriptor_;
};

}  // namespace lockstep::comm::liveness
