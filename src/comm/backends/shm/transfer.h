#pragma once

#include <cstdint>
#include <vector>

#include "comm/backends/shm/algorithms.h"
#include "comm/splits.h"

namespace lockstep::comm::shm {

/// What a rank's slot holds.
enum class Slots {
  kOneForAll,   ///< the same for every rank that reads it
  kOnePerRank,  ///< something else for every rank
};

/// Moves `sends[r]` into rank r's `receives[rank]` in chunks, for lengths of
/// any size; both have an entry for every rank. `longest` is the greatest
/// length from a rank to another, the same number on all. Begins no operation:
/// that has been done. Throws what `Channel::step` does.
void transfer(Channel& channel,
              const std::vector<Stretch>& sends,
              const std::vector<Stretch>& receives,
              Slots slots,
              size_t longest);

}  // namespace lockstep::comm::shm
