#include "launch/port.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <memory>
#include <string>
#include <system_error>

#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

[[noreturn]] void refuse(const std::string& host, int port, int error) {
  const std::string place = host + ':' + std::to_string(port);
  if (error == EADDRINUSE) {
    throw LaunchError(
        "master port " + place +
        " is already in use; choose another with --master-port, or leave it "
        "out to get a free one");
  }
  if (error == EADDRNOTAVAIL) {
    throw LaunchError("master address " + host +
                      " does not belong to this host; --master-addr must be "
                      "an address of node 0, where rank 0 runs");
  }
  throw LaunchError("cannot bind master port " + place + ": " +
                    std::generic_category().message(error));
}

/// The code of getaddrinfo.
int look_up(const std::string& host, int port, Addresses& addresses) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error == 0) addresses.reset(found);
  return error;
}

Addresses resolve(const std::string& host, int port) {
  Addresses addresses{nullptr, freeaddrinfo};
  if (const int error = look_up(host, port, addresses); error != 0) {
    throw LaunchError("master address \"" + host +
                      "\" cannot be resolved: " + gai_strerror(error) +
                      "; give --master-addr a name or address that this host "
                      "knows");
  }
  return addresses;
}

std::string text_of(const addrinfo& address) {
  char host[NI_MAXHOST] = {};
  ::getnameinfo(address.ai_addr,
                address.ai_addrlen,
                host,
                sizeof(host),
                nullptr,
                0,
                NI_NUMERICHOST);
  return host;
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET6) {
    const auto& ip = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&ip);
  }
  const auto& ip = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  return ntohl(ip.s_addr) >> 24 == IN_LOOPBACKNET;
}

/// Fails when another launcher claims the same address and port.
Fd claim(const addrinfo& address, int port) {
  const auto text =
      "lockstep-port-" + text_of(address) + '-' + std::to_string(port);
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  text.copy(name.sun_path + 1, sizeof(name.sun_path) - 1);
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), size) != 0) {
    fd.reset();
  }
  return fd;
}

Fd bind_to(const addrinfo& address) {
  Fd fd(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0) fd.reset();
  return fd;
}

int port_of(int socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

}  // namespace

ReservedPort reserve_port(const std::string& host, int port) {
  const Addresses addresses = resolve(host, port);
  int last_error = EADDRNOTAVAIL;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    ReservedPort reserved;
    reserved.socket = bind_to(*a);
    if (reserved.socket && port != 0) reserved.claim = claim(*a, port);
    if (reserved.socket && (port == 0 || reserved.claim)) {
      reserved.port = port_of(reserved.socket.get());
      return reserved;
    }
    last_error = errno;
  }
  refuse(host, port, last_error);
}

void refuse_loopback_name(const std::string& host) {
  in6_addr literal = {};
  if (::inet_pton(AF_INET, host.c_str(), &literal) == 1 ||
      ::inet_pton(AF_INET6, host.c_str(), &literal) == 1) {
    return;
  }
  Addresses addresses{nullptr, freeaddrinfo};
  // Names of hosts that start at the same time may appear later.
  if (look_up(host, 0, addresses) != 0) return;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    if (!is_loopback(*a->ai_addr)) return;
  }
  throw InvalidArgument(
      "master address \"" + host + "\" is " + text_of(*addresses) +
      " on this host, which other nodes cannot reach; give --master-addr an "
      "address of node 0 that they know (`hostname -I` lists them)");
}

void pass_on(const ReservedPort& port, ProcessSpec& spec) {
  spec.environment["LOCKSTEP_MASTER_FD"] = std::to_string(port.socket.get());
  spec.inherited.push_back(port.socket.get());
}

}  // namespace lockstep::launcher
