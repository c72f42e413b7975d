#pragma once

#include "comm/backends/shm/algorithms.h"

namespace lockstep::comm::shm {

/// A large `all_reduce` of a group of two.
void all_reduce_pair(Channel& channel, const Call& call, char* data);

}  // namespace lockstep::comm::shm
