#pragma once

#include "memory/block_cache.h"

namespace lockstep::memory {

/// Makes Lockstep's allocator libtorch's CPU allocator, for good: tensors
/// outlive everything else. It serves, in this order, the calling thread's
/// active arena, the block cache while it is on, and whatever was there before.
void install_allocator();

/// The one of the process.
BlockCache& block_cache() noexcept;

}  // namespace lockstep::memory
