#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backend_registry.h"
#include "comm/liveness.h"

namespace lockstep::comm::carried {

struct Hosts;

/// A backend whose bytes are moved by the send and recv of another one, the
/// carrier. The reductions are those of all our backends: every dtype and
/// operation, the same bits, in rank order. Before each operation the ranks
/// compare what they called, in one exchange of 56 bytes with each peer;
/// `LOCKSTEP_CHECK=0` on every rank leaves that out; what ranks get whose sizes
/// differ is then undefined.
///
/// `name` is what users know it by. `exact_sizes`: a receive of the carrier
/// takes only messages of its own size, not smaller ones. The carrier is
/// released as soon as it is of no more use: after a failure, and at the end.
/// `hosts`: null where all ranks are treated alike.
c10::intrusive_ptr<c10d::Backend> make_carried_backend(
    const std::string& name,
    const BackendContext& context,
    c10::intrusive_ptr<c10d::Backend> carrier,
    bool exact_sizes = false,
    std::shared_ptr<const Hosts> hosts = nullptr);

/// How long the verdict on a dead peer may take after a carrier lost it.
inline constexpr std::chrono::milliseconds kVerdictTime =
    std::chrono::seconds(1);

/// Throws what liveness has to say about the ranks, if that comes within
/// `limit`.
void throw_verdict(const Liveness& liveness,
                   const std::vector<int>& waiting_for,
                   const ErrorContext& context,
                   std::chrono::milliseconds limit);

}  // namespace lockstep::comm::carried
