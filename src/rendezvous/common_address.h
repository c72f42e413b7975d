#pragma once

#include "core/clock.h"
#include "core/fd.h"
#include "rendezvous/address.h"
#include "rendezvous/assigned.h"

namespace lockstep::rendezvous {

/// Where rank 0 can serve all ranks.
struct CommonAddress {
  Endpoint endpoint;
  Fd listener;  ///< on rank 0: bound to it
};

/// Collective over ranks that can exchange texts and know no address: the first
/// of rank 0's addresses, beginning with the loopback, that all of them can
/// connect to.
/// \throws StoreError  there is none; on every rank
CommonAddress find_common_address(const Assigned& assigned,
                                  const Deadline& deadline);

}  // namespace lockstep::rendezvous
