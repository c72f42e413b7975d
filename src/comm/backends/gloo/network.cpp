#include "comm/backends/gloo/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/env.h"
#include "core/fd.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::gloo {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

struct Interface {
  std::string name;
  std::string address;
};

std::string numeric(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = {};
  ::getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

std::vector<Interface> present_interfaces() {
  std::vector<Interface> result;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return result;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size =
        family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    result.push_back({i->ifa_name, numeric(i->ifa_addr, size)});
  }
  ::freeifaddrs(list);
  return result;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

Endpoint from_variable(const std::string& value) {
  const auto present = present_interfaces();
  Endpoint endpoint;
  std::istringstream stream(value);
  for (std::string word; std::getline(stream, word, ',');) {
    const auto has = [&](auto member) {
      return std::any_of(present.begin(), present.end(), [&](const auto& i) {
        return i.*member == word;
      });
    };
    if (has(&Interface::name)) {
      endpoint.interfaces.push_back(word);
    } else if (has(&Interface::address)) {
      endpoint.address = word;
    } else {
      std::string text = "GLOO_SOCKET_IFNAME=\"" + value + "\": \"" + word +
                         "\" is no interface of this host; present are";
      for (const auto& i : present) text += ' ' + i.name + '=' + i.address;
      throw InvalidArgument(text);
    }
  }
  if (!endpoint.interfaces.empty() == !endpoint.address.empty()) {
    throw InvalidArgument("GLOO_SOCKET_IFNAME=\"" + value +
                          "\" must be names of interfaces or one address");
  }
  return endpoint;
}

/// The local address of the way to `host`; nullopt when there is none.
std::optional<std::string> local_address_towards(const std::string& host,
                                                 uint16_t port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(
          host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return std::nullopt;
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(
      found, ::freeaddrinfo);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    const Fd socket(::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own = {};
    socklen_t size = sizeof own;
    auto* const address = reinterpret_cast<sockaddr*>(&own);
    if (socket && ::connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), address, &size) == 0) {
      return numeric(address, size);
    }
  }
  return std::nullopt;
}

/// The first address that is not a loopback one.
std::optional<std::string> first_outside_address() {
  for (const auto& i : present_interfaces()) {
    if (!is_loopback(i.address) && !i.address.starts_with("fe80:")) {
      return i.address;
    }
  }
  return std::nullopt;
}

c10::intrusive_ptr<c10d::Store> without_prefixes(
    c10::intrusive_ptr<c10d::Store> store) {
  while (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = prefix->getUnderlyingStore();
  }
  return store;
}

}  // namespace

Endpoint choose_endpoint(const c10::intrusive_ptr<c10d::Store>& store,
                         std::optional<bool> one_host) {
  if (const auto value = env::get("GLOO_SOCKET_IFNAME")) {
    return from_variable(*value);
  }
  if (one_host.value_or(false)) return {.interfaces = {}, .address = kLoopback};
  std::optional<std::string> address;
  const auto base = without_prefixes(store);
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(base.get())) {
    address = local_address_towards(tcp->getHost(), tcp->getPort());
  } else if (one_host) {
    address = first_outside_address();
  }
  if (one_host && is_loopback(address.value_or(kLoopback))) {
    throw InvalidArgument(
        "ranks run on several hosts, but this one would be reached at a "
        "loopback address; set MASTER_ADDR to an address that all hosts can "
        "reach, or GLOO_SOCKET_IFNAME to the network interface to use");
  }
  return {.interfaces = {}, .address = address.value_or(kLoopback)};
}

}  // namespace lockstep::comm::gloo
