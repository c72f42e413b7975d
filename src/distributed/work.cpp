#include "distributed/work.h"

#include <algorithm>
#include <utility>

#include "core/clock.h"
#include "distributed/convert_error.h"
#include "lockstep/core/error.h"

namespace lockstep {

void Work::Impl::wait(std::optional<std::chrono::milliseconds> timeout) {
  if (timeout && timeout->count() <= 0) {
    if (!work->isCompleted()) {
      throw TimeoutError("not finished; it goes on", group->context(operation));
    }
    timeout.reset();
  }
  try {
    work->wait(std::min(timeout.value_or(kNoTimeout), kLongestWait));
    const std::lock_guard lock(mutex);
    if (auto once = std::exchange(finish, nullptr)) once();
  } catch (...) {
    if (work->isCompleted() && !work->isSuccess()) group->note_failure();
    distributed::rethrow_converted(group->context(operation));
  }
}

void Work::wait(std::optional<std::chrono::milliseconds> timeout) const {
  if (impl_) impl_->wait(timeout);
}

bool Work::is_completed() const {
  return !impl_ || impl_->work->isCompleted();
}

}  // namespace lockstep
