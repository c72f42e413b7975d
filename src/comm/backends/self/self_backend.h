#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/core/error.h"

namespace lockstep::comm::self {

/// The backend of a group of one: a reduction leaves its tensor as it is, a
/// gather is a copy. No threads, no sockets, and no waiting but for the other
/// side of a message. `context` is that of its errors, `timeout` that of its
/// messages.
c10::intrusive_ptr<c10d::Backend> create(ErrorContext context,
                                         std::chrono::milliseconds timeout);

}  // namespace lockstep::comm::self
