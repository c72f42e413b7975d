#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "core/clock.h"
#include "core/fd.h"

namespace lockstep::rendezvous {

/// A TCP endpoint whose host is a numeric address.
struct Endpoint {
  std::string host;
  uint16_t port = 0;
};

/// "host:port", IPv6 in brackets.
std::string to_string(const std::string& host, uint16_t port);

/// Binds a socket to the first address of `host` that is one of this machine's,
/// IPv4 before IPv6, and listens. Port 0 lets the kernel choose.
/// \throws StoreError  port taken, host unknown or not this machine
Fd bind_to(const std::string& host, uint16_t port, const Deadline& deadline);

/// The endpoint that a socket is bound to; its port is 0 if it is no bound TCP
/// socket.
Endpoint bound_endpoint(int fd);

/// Whether something accepts a connection there, now.
bool can_connect(const Endpoint& endpoint, std::chrono::milliseconds timeout);

/// Waits until something accepts connections at one of the host's addresses
/// and returns that address.
/// \throws StoreError    the host is unknown
/// \throws TimeoutError  nobody accepted
Endpoint find_listener(const std::string& host,
                       uint16_t port,
                       const Deadline& deadline);

}  // namespace lockstep::rendezvous
