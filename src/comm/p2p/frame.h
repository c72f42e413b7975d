#pragma once

#include <cstdint>

namespace lockstep::comm::p2p {

/// What a rank tells another about one message. A message has a number among
/// all that its sender sends to its receiver.
struct Frame {
  enum class Kind : uint8_t {
    kOffer,    ///< sender: there is a message; its first bytes may come along
    kGrant,    ///< receiver: send the rest, from `offset` on
    kData,     ///< sender: bytes from `offset` on
    kTaken,    ///< receiver: all bytes are here
    kRefused,  ///< receiver: expects other elements; nothing was written
  };

  uint64_t message = 0;
  uint64_t numel = 0;   ///< kOffer: what is sent; kRefused: what is expected
  uint64_t offset = 0;  ///< in bytes
  uint64_t bytes = 0;   ///< that come along
  int32_t tag = 0;
  Kind kind = Kind::kOffer;
  uint8_t dtype = 0;  ///< beside `numel`
};

}  // namespace lockstep::comm::p2p
