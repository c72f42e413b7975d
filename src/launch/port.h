#pragma once

#include <string>

#include "core/fd.h"
#include "launch/process.h"

namespace lockstep::launcher {

/// A TCP port that stays ours: bound with SO_REUSEADDR but not listening, so
/// that rank 0, in any language, can still bind and listen on it.
struct ReservedPort {
  Fd socket;
  int port = 0;
  /// Keeps a second launcher away from a port that was asked for by number:
  /// two sockets of this kind would both be let in.
  Fd claim;
};

/// Binds `host:port`; port 0 lets the kernel choose.
/// Throws LaunchError that names the address, the port and the remedy when it
/// is taken or not an address of this host.
ReservedPort reserve_port(const std::string& host, int port);

/// Throws InvalidArgument for a name that means loopback on this host, as
/// Debian's /etc/hosts has it for the host's own: other nodes would look for
/// the store on themselves. An address in figures is taken as it is.
void refuse_loopback_name(const std::string& host);

/// Lets the process inherit the socket, its descriptor in LOCKSTEP_MASTER_FD.
void pass_on(const ReservedPort& port, ProcessSpec& spec);

}  // namespace lockstep::launcher
