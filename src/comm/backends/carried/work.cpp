#include "comm/backends/carried/work.h"

namespace lockstep::comm::carried {

QueuedWork::QueuedWork(c10d::OpType type,
                       std::vector<at::Tensor> outputs,
                       ErrorContext context)
    : Work(context.rank, type),
      outputs_(std::move(outputs)),
      context_(std::move(context)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))) {
}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto completed = [this] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, completed);
  } else if (!cv_.wait_for(lock, timeout, completed)) {
    ErrorContext context = context_;
    context.elapsed = timeout;
    throw TimeoutError("the operation did not end in the time given to wait",
                       std::move(context));
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void QueuedWork::complete(const std::exception_ptr& error) {
  finish(error);
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace lockstep::comm::carried
