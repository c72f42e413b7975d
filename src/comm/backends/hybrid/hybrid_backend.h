#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backend_registry.h"

namespace lockstep::comm::hybrid {

/// The "hybrid" backend: "shm" where all ranks are on one host. On several,
/// shared memory inside each and Gloo between them (MPI in a build without
/// Gloo), in the algorithms of carried/hierarchy.h, where every host has the
/// same number of ranks, two at least; else "gloo" (or "mpi") alone. Ranks
/// share a host when they really reach each other there. Collective over the
/// context's ranks.
///
/// Throws what these backends throw.
c10::intrusive_ptr<c10d::Backend> create(const BackendContext& context);

}  // namespace lockstep::comm::hybrid
