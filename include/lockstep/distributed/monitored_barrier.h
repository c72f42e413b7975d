#pragma once

#include <chrono>
#include <optional>

#include "lockstep/core/export.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep {

struct MonitoredBarrierOptions {
  ProcessGroup group = {};  ///< empty: the default group
  /// Bound of the wait; unset: the group's.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Returns when every rank of the group has called it; else every rank that
/// did so, sooner or later, gets the same list of those that did not come in
/// time. For debugging: it goes over the store, and so works on every backend,
/// also between collectives that hang; it is slower than `barrier`. Blocking.
///
/// Mirrors `torch.distributed.monitored_barrier`, here always with
/// `wait_all_ranks`.
///
/// \throws TimeoutError  names the ranks that did not come, the same on all.
///     The first rank of the group decides at its deadline, which counts from
///     when it came; where that one is missing, the others name it a second
///     after theirs. In a group with Python ranks (`interop`) Gloo decides, and
///     its error is a BackendError.
/// \throws PeerLost, StoreError, InvalidArgument
LOCKSTEP_API void monitored_barrier(
    const MonitoredBarrierOptions& options = {});

}  // namespace lockstep
