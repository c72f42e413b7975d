#include "comm/liveness/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

#include "core/poll_until.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::liveness {
namespace {

constexpr int kStream = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;

int checked(int result, const std::string& what) {
  if (result >= 0) return result;
  const int code = errno;
  const char* remedy =
      code == EMFILE || code == ENFILE
          ? "; raise the limit of open files (ulimit -n): each rank of a host "
            "keeps a connection to every other"
          : "";
  throw BackendError(what + ": " + std::strerror(code) + remedy, {}, code);
}

struct AnyAddress {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

AnyAddress abstract(const std::string& name) {
  AnyAddress address;
  auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
  un->sun_family = AF_UNIX;
  // The leading zero byte makes the name abstract: nothing in the file system.
  std::copy(name.begin(), name.end(), un->sun_path + 1);
  address.length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

AnyAddress resolve(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  AnyAddress address;
  address.length = 0;
  if (::getaddrinfo(
          host.c_str(), std::to_string(port).c_str(), &hints, &found) == 0) {
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    address.length = found->ai_addrlen;
    ::freeaddrinfo(found);
  }
  return address;
}

AnyAddress numeric(const TcpAddress& address) {
  auto resolved = resolve(address.ip, address.port, AI_NUMERICHOST);
  if (resolved.length == 0) {
    throw BackendError("\"" + address.ip + "\" is not an IP address");
  }
  return resolved;
}

std::string ip_of(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address,
                    length,
                    text.data(),
                    text.size(),
                    nullptr,
                    0,
                    NI_NUMERICHOST) != 0) {
    return {};
  }
  return text.data();
}

/// A peer's host that vanished without a packet ends the connection.
void watch_the_line(int socket) {
  const auto set = [socket](int level, int option, int value) {
    ::setsockopt(socket, level, option, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 25'000);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

}  // namespace

std::string random_hex(size_t bytes) {
  std::string raw(bytes, '\0');
  if (::getrandom(raw.data(), bytes, 0) != static_cast<ssize_t>(bytes)) {
    checked(-1, "getrandom");
  }
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const char c : raw) {
    const auto byte = static_cast<unsigned char>(c);
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

bool equal_in_constant_time(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = difference | static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

Fd listen_abstract(const std::string& name, int backlog) {
  Fd fd(checked(::socket(AF_UNIX, kStream, 0), "cannot make a Unix socket"));
  auto address = abstract(name);
  checked(::bind(fd.get(), address.get(), address.length),
          "cannot bind an abstract Unix socket");
  checked(::listen(fd.get(), backlog), "cannot listen on a Unix socket");
  return fd;
}

Reached connect_abstract(const std::string& name, Fd& socket) {
  Fd fd(checked(::socket(AF_UNIX, kStream, 0), "cannot make a Unix socket"));
  auto address = abstract(name);
  if (::connect(fd.get(), address.get(), address.length) == 0) {
    socket = std::move(fd);
    return Reached::Yes;
  }
  switch (errno) {
    case EAGAIN:
    case EINTR:
      return Reached::TryAgain;
    case ECONNREFUSED:
      return Reached::NobodyThere;
    default:
      return Reached::Forbidden;
  }
}

Fd listen_tcp(const std::string& ip, int backlog, TcpAddress& bound) {
  auto address = numeric({ip, 0});
  Fd fd(checked(::socket(address.storage.ss_family, kStream, 0),
                "cannot make a TCP socket"));
  checked(::bind(fd.get(), address.get(), address.length),
          "cannot bind a TCP socket to " + ip);
  checked(::listen(fd.get(), backlog), "cannot listen on " + ip);
  checked(::getsockname(fd.get(), address.get(), &address.length),
          "getsockname");
  // sin_port and sin6_port lie at the same place.
  bound = {ip,
           ::ntohs(reinterpret_cast<sockaddr_in*>(address.get())->sin_port)};
  return fd;
}

Fd connect_tcp(const TcpAddress& address, const Deadline& deadline) {
  const auto where = address.ip + ':' + std::to_string(address.port);
  auto target = numeric(address);
  Fd fd(checked(::socket(target.storage.ss_family, kStream, 0),
                "cannot make a TCP socket"));
  if (::connect(fd.get(), target.get(), target.length) != 0) {
    if (errno != EINPROGRESS) checked(-1, "cannot connect to " + where);
    if (!poll_until(fd.get(), POLLOUT, deadline)) {
      throw TimeoutError("no answer from " + where);
    }
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    errno = error;
    if (error != 0) checked(-1, "cannot connect to " + where);
  }
  watch_the_line(fd.get());
  return fd;
}

Fd accept_one(const Fd& listener) {
  while (true) {
    Fd fd(::accept4(
        listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      AnyAddress own;
      ::getsockname(fd.get(), own.get(), &own.length);
      if (own.storage.ss_family != AF_UNIX) watch_the_line(fd.get());
      return fd;
    }
    if (errno == EAGAIN) return {};
    if (errno == EINTR || errno == ECONNABORTED) continue;
    checked(-1, "cannot accept a connection");
  }
}

std::optional<std::string> address_towards(const std::string& host) {
  // Connecting a datagram socket sends nothing; it only picks the route.
  auto target = resolve(host, 9, 0);
  if (target.length == 0) return std::nullopt;
  const Fd fd(::socket(target.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), target.get(), target.length) != 0) {
    return std::nullopt;
  }
  AnyAddress own;
  if (::getsockname(fd.get(), own.get(), &own.length) != 0) {
    return std::nullopt;
  }
  return ip_of(own.get(), own.length);
}

std::string first_address() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "127.0.0.1";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list,
                                                                 ::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* at = list; at != nullptr; at = at->ifa_next) {
      if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != family ||
          (at->ifa_flags & IFF_UP) == 0 ||
          (at->ifa_flags & IFF_LOOPBACK) != 0) {
        continue;
      }
      const socklen_t length =
          family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      auto ip = ip_of(at->ifa_addr, length);
      if (!ip.empty()) return ip;
    }
  }
  return "127.0.0.1";
}

}  // namespace lockstep::comm::liveness
