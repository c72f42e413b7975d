#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/core/error.h"

namespace lockstep::comm::self {

/// The backend of a group of one: a reduction leaves its tensor as it is, a
/// gather is a copy. No threads, no sockets, no waiting. `context` is that of
/// its errors.
c10::intrusive_ptr<c10d::Backend> create(ErrorContext context);

}  // namespace lockstep::comm::self
