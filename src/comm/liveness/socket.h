#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "core/clock.h"
#include "core/fd.h"

/// The sockets of the control connections: non-blocking, CLOEXEC. Failures of
/// the system are BackendErrors.
namespace lockstep::comm::liveness {

/// Random bytes from the kernel, as hexadecimal digits.
std::string random_hex(size_t bytes);

/// Compares in a time that depends on the lengths alone.
bool equal_in_constant_time(const std::string& a, const std::string& b);

/// Listens on an abstract Unix socket.
Fd listen_abstract(const std::string& name, int backlog);

enum class Reached { Yes, NobodyThere, Forbidden, TryAgain };

/// Connects to an abstract Unix socket. `NobodyThere` where nobody listens
/// under the name in this network namespace, `Forbidden` by a security policy;
/// `TryAgain` when the listener's queue is full.
Reached connect_abstract(const std::string& name, Fd& socket);

/// An IP address in digits, with a port.
struct TcpAddress {
  std::string ip;
  uint16_t port = 0;
};

/// Listens on `ip` alone, at a port that the kernel picks.
Fd listen_tcp(const std::string& ip, int backlog, TcpAddress& bound);

/// Connects; a host that disappears is noticed within half a minute.
/// Throws TimeoutError at the deadline.
Fd connect_tcp(const TcpAddress& address, const Deadline& deadline);

/// Accepts one waiting connection; none: an empty Fd.
Fd accept_one(const Fd& listener);

/// This host's own address on the way to `host` (a name or an address), or
/// nullopt when there is no way.
std::optional<std::string> address_towards(const std::string& host);

/// The address of the first interface that is up and not the loopback; without
/// one 127.0.0.1.
std::string first_address();

}  // namespace lockstep::comm::liveness
