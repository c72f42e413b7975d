#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/clock.h"
#include "distributed/group.h"

namespace lockstep::distributed {

/// Gives the group the backend that it wants, and tells the others of the group
/// if that fails. Collective. The group's ranks, timeout and liveness are
/// there; `store` has its key space.
void connect(Group& group,
             const c10::intrusive_ptr<c10d::Store>& store,
             const Deadline& deadline,
             bool interop);

/// Names the backend and makes `process_group` from the rest.
void complete(Group& group);

}  // namespace lockstep::distributed
