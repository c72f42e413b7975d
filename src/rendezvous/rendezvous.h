#pragma once

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/clock.h"
#include "lockstep/distributed/process_group.h"
#include "rendezvous/assigned.h"

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
  /// What the store is kept by in this process (open_stores.h); empty: it is
  /// not kept.
  std::string place = {};
};

/// Finds the rank's place from arguments, URL, environment and what the backend
/// says (`assigned`), and makes or joins the store. A world of one gets a store
/// in memory. A store that this process has made or joined before is used
/// again.
/// \throws InvalidArgument  settings that are wrong, missing (all are named) or
///     in conflict, before any use of the network
/// \throws StoreError    port taken, host unknown, what listens is no store
/// \throws TimeoutError  rank 0 was not there in time
Joined join(const InitOptions& options,
            bool interop,
            const Deadline& deadline,
            const std::optional<Assigned>& assigned = {});

}  // namespace lockstep::rendezvous
