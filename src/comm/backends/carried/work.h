#pragma once

#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::comm::carried {

/// An operation in the backend's queue. Its future holds the output tensors.
class QueuedWork final : public c10d::Work {
 public:
  QueuedWork(c10d::OpType type,
             std::vector<at::Tensor> outputs,
             ErrorContext context);

  /// Waits without a bound of its own for `kNoTimeout`: the operation has one.
  /// Throws the operation's error, or TimeoutError at the deadline.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  uint64_t getSequencenumber() const override {
    return context_.sequence.value_or(0);
  }

  /// Called once by the worker; null: success.
  void complete(const std::exception_ptr& error);

  [[nodiscard]] const ErrorContext& context() const { return context_; }

 private:
  std::vector<at::Tensor> outputs_;
  ErrorContext context_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep::comm::carried
