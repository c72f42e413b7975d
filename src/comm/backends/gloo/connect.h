#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/backend_registry.h"

namespace lockstep::comm::gloo {

/// The "gloo" backend, from the Gloo inside libtorch. Collective over the
/// context's ranks.
///
/// In an interop group it is c10d's own ProcessGroupGloo and nothing else is on
/// the wire. Otherwise Gloo moves the bytes and the reductions are those of all
/// our backends: every dtype and operation, the same bits, in rank order.
/// Before each operation the ranks compare what they called, in one exchange of
/// 56 bytes with each peer (about 40 us between processes of one host);
/// `LOCKSTEP_CHECK=0` on every rank leaves that out; what ranks get whose sizes
/// differ is then undefined.
///
/// Throws InvalidArgument, TimeoutError, PeerLost, BackendError.
c10::intrusive_ptr<c10d::Backend> create(const BackendContext& context);

/// Gloo as it is, which make_carried_backend takes. Collective over the
/// context's ranks, whose liveness is not null. Throws as `create` does.
c10::intrusive_ptr<c10d::Backend> make_carrier(const BackendContext& context);

}  // namespace lockstep::comm::gloo
