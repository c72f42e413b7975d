#include "launch/port.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
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

Addresses resolve(const std::string& host, int port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw LaunchError("master address \"" + host +
                      "\" cannot be resolved: " + gai_strerror(error) +
                      "; give --master-addr a name or address that this host "
                      "knows");
  }
  return {found, freeaddrinfo};
}

Fd claim_port(const std::string& host, int port) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  const std::string text = "lockstep-port-" + std::to_string(port);
  std::memcpy(name.sun_path + 1, text.data(), text.size());
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), size) != 0) {
    refuse(host, port, errno);
  }
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
  ReservedPort reserved;
  if (port != 0) reserved.claim = claim_port(host, port);
  int last_error = EADDRNOTAVAIL;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    Fd fd(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (fd &&
        ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ==
            0 &&
        ::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0) {
      reserved.port = port_of(fd.get());
      reserved.socket = std::move(fd);
      return reserved;
    }
    last_error = errno;
  }
  refuse(host, port, last_error);
}

void pass_on(const ReservedPort& port, ProcessSpec& spec) {
  spec.environment["LOCKSTEP_MASTER_FD"] = std::to_string(port.socket.get());
  spec.inherited.push_back(port.socket.get());
}

}  // namespace lockstep::launcher
