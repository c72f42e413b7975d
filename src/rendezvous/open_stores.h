#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/clock.h"

/// The stores of this process by the place where they were met, kept until its
/// end: a second group meets at the same store, and nobody can take the port
/// in between. All is thread safe.
namespace lockstep::rendezvous {

/// Null where there is none.
c10::intrusive_ptr<c10d::Store> find_store(const std::string& place);

void keep_store(const std::string& place,
                c10::intrusive_ptr<c10d::Store> store);

/// The next group makes or joins a store anew.
void forget_store(const std::string& place);

/// Closes all. For the end of the process.
void close_stores();

/// The number of the next group over `place`'s store, from 0, the same on all
/// ranks: it keeps the groups' keys apart. Rank 0 tells the number to ranks
/// that join the store later; attempts that ended without this rank are passed
/// over. `store` has the store's keys.
/// \throws TimeoutError  rank 0 did not come
int next_generation(const std::string& place,
                    int rank,
                    const c10::intrusive_ptr<c10d::Store>& store,
                    const Deadline& deadline);

/// The keys of one group: c10d's own chain of prefixes.
c10::intrusive_ptr<c10d::Store> group_store(
    const c10::intrusive_ptr<c10d::Store>& store, int generation);

}  // namespace lockstep::rendezvous
