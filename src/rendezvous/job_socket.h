#pragma once

#include <cstdint>
#include <string>

#include "core/clock.h"

namespace lockstep::rendezvous {

/// Meeting of the ranks of one job on one host that share nothing but the job's
/// name: at an abstract Unix socket named by user and job, where rank 0 hands
/// out the port of its store. Processes of other users are turned away.

/// Rank 0: gives `port` to all other ranks.
/// \throws InvalidArgument  a rank that came twice
/// \throws StoreError  another process is rank 0 of the same job
/// \throws TimeoutError  names the ranks that did not come
void hand_out_port(const std::string& job,
                   int world_size,
                   uint16_t port,
                   const Deadline& deadline);

/// Other ranks: the port of rank 0's store.
/// \throws TimeoutError  rank 0 did not come
uint16_t ask_for_port(const std::string& job,
                      int rank,
                      const Deadline& deadline);

}  // namespace lockstep::rendezvous
