#include "rendezvous/common_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::rendezvous {
namespace {

// Of one address from another host of the same network.
constexpr std::chrono::milliseconds kConnectTime(500);

/// So many are tried; their text is short.
constexpr size_t kMostAddresses = 8;

std::vector<std::string> own_addresses() {
  std::vector<std::string> result = {"127.0.0.1"};
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return result;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET ||
        (i->ifa_flags & IFF_UP) == 0 || (i->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    char text[INET_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET,
                &reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr,
                text,
                sizeof text);
    result.emplace_back(text);
  }
  ::freeifaddrs(list);
  result.resize(std::min(result.size(), kMostAddresses));
  return result;
}

struct Candidates {
  std::vector<Endpoint> endpoints;
  std::vector<Fd> listeners;
};

Candidates bind_all(const Deadline& deadline) {
  Candidates result;
  for (const auto& address : own_addresses()) {
    try {
      Fd fd = bind_to(address, 0, deadline);
      result.endpoints.push_back(bound_endpoint(fd.get()));
      result.listeners.push_back(std::move(fd));
    } catch (const StoreError&) {
      // The others may do.
    }
  }
  return result;
}

std::string to_text(const std::vector<Endpoint>& endpoints) {
  std::string text;
  for (const auto& [host, port] : endpoints) {
    text += host + ' ' + std::to_string(port) + ' ';
  }
  return text;
}

std::vector<Endpoint> from_text(const std::string& text) {
  std::vector<Endpoint> result;
  std::istringstream stream(text);
  for (Endpoint next; stream >> next.host >> next.port;) result.push_back(next);
  return result;
}

}  // namespace

CommonAddress find_common_address(const Assigned& assigned,
                                  const Deadline& deadline) {
  Candidates own;
  if (assigned.rank == 0) own = bind_all(deadline);
  const auto endpoints =
      from_text(assigned.exchange(to_text(own.endpoints))[0]);
  std::string reached;  // '1' for each endpoint that this rank can connect to
  for (const auto& endpoint : endpoints) {
    reached += can_connect(endpoint, kConnectTime) ? '1' : '0';
  }
  const auto by_rank = assigned.exchange(reached);
  for (size_t i = 0; i < endpoints.size(); ++i) {
    if (!std::all_of(by_rank.begin(), by_rank.end(), [i](const auto& answers) {
          return i < answers.size() && answers[i] == '1';
        })) {
      continue;
    }
    CommonAddress result{endpoints[i], {}};
    if (assigned.rank == 0) result.listener = std::move(own.listeners[i]);
    return result;
  }
  throw StoreError(
      "no address of rank 0 can be reached from all ranks (tried " +
          to_text(endpoints) +
          "); set MASTER_ADDR and MASTER_PORT to one that can",
      {.operation = "init_process_group"});
}

}  // namespace lockstep::rendezvous
