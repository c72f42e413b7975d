#pragma once

#include "core/clock.h"

namespace lockstep {

/// Waits until a descriptor has one of `poll`'s `events`, an error or an end;
/// false at the deadline. A signal does not end the wait.
bool poll_until(int fd, short events, const Deadline& deadline);

}  // namespace lockstep
