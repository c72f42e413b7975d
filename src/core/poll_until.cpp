#include "core/poll_until.h"

#include <poll.h>

namespace lockstep {

bool poll_until(int fd, short events, const Deadline& deadline) {
  pollfd wait = {.fd = fd, .events = events, .revents = 0};
  while (::poll(&wait, 1, poll_limit(deadline.remaining())) != 1) {
    if (deadline.passed()) return false;
  }
  return true;
}

}  // namespace lockstep
