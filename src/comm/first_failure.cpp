#include "comm/first_failure.h"

#include <string>
#include <utility>

namespace lockstep::comm {

void FirstFailure::note(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (error_) return;
  error_ = std::move(error);
  happened_.store(true, std::memory_order_release);
}

std::exception_ptr FirstFailure::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void FirstFailure::refuse(ErrorContext context) const {
  std::string reason;
  try {
    std::rethrow_exception(error());
  } catch (const Error& error) {
    context.peers = error.context().peers;
    reason = error.what();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  throw BackendError(
      "the group cannot be used again, since it failed; call "
      "destroy_process_group and init_process_group. The failure was: " +
          reason,
      std::move(context));
}

}  // namespace lockstep::comm
