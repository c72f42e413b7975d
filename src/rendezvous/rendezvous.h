#pragma once

#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/distributed/process_group.h"

namespace lockstep::rendezvous {

/// Where a rank stands when its store does.
struct Joined {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank = {};
  std::optional<int> local_world_size = {};
  /// This process serves the store: it must stay until the others are done.
  bool hosts_store = false;
  /// Number of groups that were made over the store before: keeps their keys
  /// apart, and is the group's name for c10d.
  int generation = 0;
};

/// Finds the rank's place from arguments, URL and environment, and makes or
/// joins the store. A world of one gets a store in memory. A store that this
/// process has made or joined before is used again.
/// \throws InvalidArgument  settings that are wrong, missing (all are named) or
///     in conflict, before any use of the network
/// \throws StoreError    port taken, host unknown
/// \throws TimeoutError  rank 0 was not there in time
Joined join(const InitOptions& options, bool interop);

/// Closes the stores that `join` made. For the end of the process.
void close_stores();

}  // namespace lockstep::rendezvous
