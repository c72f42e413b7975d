#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backend_registry.h"

namespace lockstep::comm::shm {

/// Collective over the context's ranks, which must all share this host: the
/// backend "shm", collectives of CPU tensors through one anonymous shared
/// segment. Its size is a matter of the ranks alone (layout.h).
///
/// Operations run in the caller unless they are asynchronous or others are
/// queued; then on a thread of the backend, in the order of the calls. After a
/// MismatchError, TimeoutError, PeerLost or BackendError every further call
/// throws a BackendError that repeats the cause.
///
/// Throws Unsupported where the ranks do not share a host, BackendError for
/// lack of memory, PeerLost, TimeoutError.
c10::intrusive_ptr<c10d::Backend> create(const BackendContext& context);

}  // namespace lockstep::comm::shm
