#include "rendezvous/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "core/poll_until.h"
#include "lockstep/core/error.h"
#include "rendezvous/call_thread.h"

namespace lockstep::rendezvous {
namespace {

using std::chrono::milliseconds;

// A name server that does not answer is asked again for this long: names of
// freshly started containers appear late.
constexpr auto kNameServerPatience = milliseconds(5000);
constexpr auto kConnectPatience = milliseconds(2000);
constexpr auto kFirstPause = milliseconds(1);
constexpr auto kLongestPause = milliseconds(50);

const ErrorContext kContext = {.operation = "init_process_group"};

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
  [[nodiscard]] int family() const { return storage.ss_family; }
};

std::string numeric_host(const Address& address) {
  char host[NI_MAXHOST] = {};
  ::getnameinfo(address.get(),
                address.length,
                host,
                sizeof host,
                nullptr,
                0,
                NI_NUMERICHOST);
  return host;
}

struct Found {
  int code = 0;  ///< of getaddrinfo
  std::vector<Address> addresses;
};

Found look_up(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  Found found;
  found.code =
      ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  for (auto* i = list; i != nullptr; i = i->ai_next) {
    Address address;
    std::memcpy(&address.storage, i->ai_addr, i->ai_addrlen);
    address.length = i->ai_addrlen;
    found.addresses.push_back(address);
  }
  if (list) ::freeaddrinfo(list);
  return found;
}

/// A name server that keeps silent costs a thread that is left to itself.
Found look_up_name(const std::string& host,
                   uint16_t port,
                   const Deadline& deadline) {
  CallThread thread;
  auto found =
      thread.run([host, port] { return look_up(host, port, 0); }, deadline);
  return found.valid() ? found.get() : Found{EAI_AGAIN, {}};
}

/// All addresses of a host, IPv4 first: where "localhost" stands for both,
/// both sides begin with the same.
std::vector<Address> resolve(const std::string& host,
                             uint16_t port,
                             const Deadline& deadline) {
  const Deadline patience(
      std::min(deadline.remaining(), milliseconds(kNameServerPatience)));
  auto found = look_up(host, port, AI_NUMERICHOST);
  if (found.code != 0) found = look_up_name(host, port, patience);
  while (found.code == EAI_AGAIN && !patience.passed()) {
    std::this_thread::sleep_for(kLongestPause);
    found = look_up_name(host, port, patience);
  }
  auto& [code, addresses] = found;
  if (code != 0 || addresses.empty()) {
    throw StoreError("host \"" + host + "\" of " + to_string(host, port) +
                         " is unknown (" + ::gai_strerror(code) +
                         "); correct MASTER_ADDR or the URL, or use a numeric "
                         "address",
                     kContext);
  }
  std::stable_partition(addresses.begin(),
                        addresses.end(),
                        [](const Address& a) { return a.family() == AF_INET; });
  return addresses;
}

bool accepts(const Address& address, milliseconds timeout) {
  const Fd fd(::socket(
      address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return false;
  if (::connect(fd.get(), address.get(), address.length) == 0) return true;
  if (errno != EINPROGRESS) return false;
  if (!poll_until(fd.get(), POLLOUT, Deadline(timeout))) return false;
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0;
}

std::string remedy(int error) {
  switch (error) {
    case EADDRINUSE:
      return "; another job or another process with RANK=0 uses that port: "
             "choose another MASTER_PORT, or start with `lockstep run`, which "
             "finds a free one";
    case EADDRNOTAVAIL:
      return "; it is no address of this machine: run rank 0 where "
             "MASTER_ADDR points to";
    case EACCES:
      return "; choose a port above 1023";
    default:
      return "";
  }
}

}  // namespace

std::string to_string(const std::string& host, uint16_t port) {
  const bool ipv6 = host.find(':') != std::string::npos;
  return (ipv6 ? '[' + host + ']' : host) + ':' + std::to_string(port);
}

Fd bind_to(const std::string& host, uint16_t port, const Deadline& deadline) {
  int error = EADDRNOTAVAIL;
  for (const Address& address : resolve(host, port, deadline)) {
    Fd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (!fd) {
      error = errno;
      continue;
    }
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(fd.get(), address.get(), address.length) == 0 &&
        ::listen(fd.get(), SOMAXCONN) == 0) {
      return fd;
    }
    error = errno;
    if (error != EADDRNOTAVAIL) break;
  }
  throw StoreError("rank 0 cannot serve the store at " + to_string(host, port) +
                       ": " + std::strerror(error) + remedy(error),
                   kContext);
}

Endpoint bound_endpoint(int fd) {
  Address address;
  address.length = sizeof address.storage;
  if (::getsockname(fd,
                    reinterpret_cast<sockaddr*>(&address.storage),
                    &address.length) != 0) {
    return {};
  }
  const auto* data = &address.storage;
  if (address.family() == AF_INET) {
    return {numeric_host(address),
            ntohs(reinterpret_cast<const sockaddr_in*>(data)->sin_port)};
  }
  if (address.family() == AF_INET6) {
    return {numeric_host(address),
            ntohs(reinterpret_cast<const sockaddr_in6*>(data)->sin6_port)};
  }
  return {};
}

bool can_connect(const Endpoint& endpoint, milliseconds timeout) {
  const auto found = look_up(endpoint.host, endpoint.port, AI_NUMERICHOST);
  return found.code == 0 && !found.addresses.empty() &&
         accepts(found.addresses.front(), timeout);
}

Endpoint find_listener(const std::string& host,
                       uint16_t port,
                       const Deadline& deadline) {
  const auto addresses = resolve(host, port, deadline);
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    for (const Address& address : addresses) {
      if (accepts(address, std::min(deadline.remaining(), kConnectPatience))) {
        return {numeric_host(address), port};
      }
    }
    if (deadline.passed()) {
      ErrorContext context = kContext;
      context.peers = {0};
      context.elapsed = deadline.elapsed();
      throw TimeoutError("nobody serves the store at " + to_string(host, port) +
                             "; start rank 0 there, or correct MASTER_ADDR and "
                             "MASTER_PORT",
                         context);
    }
    std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
  }
}

}  // namespace lockstep::rendezvous
