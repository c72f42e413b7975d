#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::comm::shm {

/// One operation of the backend. Keeps its tensors alive.
///
/// Thread safety: all members, but for `run`, which is called once.
class ShmWork final : public c10d::Work {
 public:
  using Tensors = std::vector<at::Tensor>;

  ShmWork(ErrorContext context,
          c10d::OpType type,
          Tensors outputs,
          Tensors inputs);

  /// Calls `body(outputs, inputs)` and records how it ended.
  template <class Body>
  void run(Body&& body) noexcept {
    std::exception_ptr error;
    try {
      body(outputs_, inputs_);
    } catch (...) {
      error = std::current_exception();
    }
    end(std::move(error));
  }

  /// Throws the operation's error, or TimeoutError when it has not ended in
  /// time (it then goes on). Without a timeout it waits for the end, which the
  /// operation's own deadlines bound.
  bool wait(std::chrono::milliseconds timeout) override;
  Tensors result() override { return outputs_; }
  /// Its value is the list of outputs.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void end(std::exception_ptr error) noexcept;
  void complete(c10::ivalue::Future& future) const;

  const ErrorContext context_;
  const Tensors outputs_;
  const Tensors inputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep::comm::shm
