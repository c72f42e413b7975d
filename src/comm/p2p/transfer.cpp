#include "comm/p2p/transfer.h"

#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include <utility>

namespace lockstep::comm::p2p {
namespace {

c10d::OpType type_of(Direction direction, bool any_source) {
  if (direction == Direction::kSend) return c10d::OpType::SEND;
  return any_source ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
}

}  // namespace

Transfer::Transfer(std::shared_ptr<Messenger> messenger,
                   ErrorContext context,
                   Direction direction,
                   at::Tensor tensor,
                   std::optional<int> peer,
                   int tag,
                   std::chrono::milliseconds timeout)
    : Work(context.rank, type_of(direction, !peer)),
      messenger_(std::move(messenger)),
      context_(std::move(context)),
      direction_(direction),
      tensor_(std::move(tensor)),
      peer_(peer),
      tag_(tag),
      timeout_(timeout),
      deadline_(timeout) {
}

bool Transfer::wait(std::chrono::milliseconds timeout) {
  if (!ended()) messenger_->wait(*this, timeout);
  if (!ended()) {
    throw TimeoutError("not finished within " +
                           std::to_string(timeout.count()) +
                           " ms; it goes on, and its tensor must not be "
                           "touched before it ends",
                       context_);
  }
  const std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

bool Transfer::end(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  completed_ = true;
  exception_ = std::move(error);
  ended_.store(true, std::memory_order_release);
  return future_ != nullptr;
}

c10::intrusive_ptr<c10::ivalue::Future> Transfer::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()));
  const auto future = future_;
  const bool completed = completed_;
  lock.unlock();
  if (completed) complete_future();
  return future;
}

void Transfer::complete_future() const {
  if (exception_) {
    future_->setError(exception_);
  } else {
    future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
  }
}

}  // namespace lockstep::comm::p2p
