#pragma once

#include <cstddef>

namespace lockstep::comm::shm {

/// Bytes that this process can still allocate: what the machine has available,
/// or less where its control group is limited.
size_t memory_left();

}  // namespace lockstep::comm::shm
