#pragma once

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace lockstep::comm::gloo {

/// Where a rank listens for its peers.
struct Endpoint {
  std::vector<std::string> interfaces;  ///< names; empty: `address` counts
  std::string address;                  ///< numeric
};

/// The endpoint by which the peers reach this rank: GLOO_SOCKET_IFNAME (names
/// of interfaces separated by commas, or one address), else the loopback where
/// all ranks are on one host, else the local address of the way to the store's
/// host. `one_host` is unset where that is not known. The own host name is
/// never asked for.
///
/// Throws InvalidArgument that lists the interfaces present when the variable
/// names another one, and when other hosts would be told a loopback address.
Endpoint choose_endpoint(const c10::intrusive_ptr<c10d::Store>& store,
                         std::optional<bool> one_host);

}  // namespace lockstep::comm::gloo
