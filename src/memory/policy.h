#pragma once

namespace lockstep::memory {

/// What the first `DistributedDataParallel` calls: `enable()`, unless the user
/// called `enable` or `disable` before.
void enable_by_default();

}  // namespace lockstep::memory
