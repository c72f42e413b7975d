#pragma once

#include <cstddef>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backend_registry.h"

namespace lockstep::comm::mpi {

/// The "mpi" backend: MPI moves the bytes, all else is that of CarriedBackend.
/// Collective over the context's ranks, which must be processes of one
/// MPI_COMM_WORLD. MPI is initialised with the first group, unless the program
/// has done so, and finalised as the process ends.
///
/// MPI cannot do without a process that died, nor take a receive back that has
/// begun. After a failure with one or the other the process does not use MPI
/// again, and leaves it as it is at the end.
///
/// Throws InvalidArgument, TimeoutError, PeerLost, BackendError.
c10::intrusive_ptr<c10d::Backend> create(const BackendContext& context);

/// MPI as make_carried_backend takes it. Collective over the context's ranks.
/// Throws as `create` does.
c10::intrusive_ptr<c10d::Backend> make_carrier(const BackendContext& context);
inline constexpr bool kExactSizes = true;

/// What MPI says about this process, which initialises it. Throws as `create`.
rendezvous::Assigned assigned(const Deadline& deadline);

/// For tests: messages of the groups made from now on go in parts of so many
/// bytes.
void set_longest_part(size_t bytes);

}  // namespace lockstep::comm::mpi
