#include "comm/backends/shm/shm_work.h"

#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

namespace lockstep::comm::shm {

ShmWork::ShmWork(ErrorContext context,
                 c10d::OpType type,
                 Tensors outputs,
                 Tensors inputs)
    : Work(context.rank, type),
      context_(std::move(context)),
      outputs_(std::move(outputs)),
      inputs_(std::move(inputs)) {
}

void ShmWork::end(std::exception_ptr error) noexcept {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    completed_ = true;
    exception_ = std::move(error);
    future = future_;
  }
  cv_.notify_all();
  if (future) complete(*future);
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return completed_; };
  if (timeout <= kNoTimeout) {
    cv_.wait(lock, ended);
  } else if (!cv_.wait_for(lock, timeout, ended)) {
    throw TimeoutError("not finished within " +
                           std::to_string(timeout.count()) +
                           " ms; it goes on, and its tensors must not be "
                           "touched before it ends",
                       context_);
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()));
  const auto future = future_;
  const bool ended = completed_;
  lock.unlock();
  if (ended) complete(*future);
  return future;
}

void ShmWork::complete(c10::ivalue::Future& future) const {
  if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace lockstep::comm::shm
