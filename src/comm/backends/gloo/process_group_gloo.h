#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace lockstep::comm::gloo {

/// libtorch's own c10d::ProcessGroupGloo, connected to all ranks through keys
/// right under `store`. The only place that knows its class. `interfaces` are
/// names of network interfaces; when there are none, it listens on `address`.
///
/// Collective and blocking. Throws what c10d and Gloo throw.
c10::intrusive_ptr<c10d::Backend> make_process_group_gloo(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int world_size,
    std::chrono::milliseconds timeout,
    const std::vector<std::string>& interfaces,
    const std::string& address);

}  // namespace lockstep::comm::gloo
