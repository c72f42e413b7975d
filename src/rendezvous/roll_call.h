#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::rendezvous {

/// "libtorch 2.13.0 and Lockstep 0.1.0" of this process.
std::string own_versions();

/// Collective over a group's store. Returns when all ranks have arrived, each
/// once and with the same `versions`; fails on all of them otherwise.
/// \throws InvalidArgument  two processes have the same rank
/// \throws MismatchError    two ranks have different versions; names both
/// \throws TimeoutError     names the ranks that did not arrive
/// \throws StoreError       the store was lost
void roll_call(c10d::Store& store,
               int rank,
               int world_size,
               std::chrono::milliseconds timeout,
               const std::string& versions = own_versions());

/// Whether the call that begins with `rank` is over already: the others have
/// waited for it in vain, or this process has answered before and failed later.
bool roll_call_is_over(c10d::Store& store, int rank);

/// Leaves the versions where `roll_call` does, and checks nothing.
void publish_versions(c10d::Store& store, int rank);

}  // namespace lockstep::rendezvous
