#pragma once

#include <mpi.h>

#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace lockstep::comm::mpi {

class Messages;

/// One tensor to or from another rank. Progress is made by those who wait or
/// ask, and by nobody else.
class Message final : public c10d::Work {
 public:
  /// `peer` is MPI_ANY_SOURCE for a message from anyone.
  Message(c10d::OpType type,
          at::Tensor tensor,
          int peer,
          int tag,
          std::shared_ptr<Messages> messages);

  bool isCompleted() override;
  /// False after `abort`, which ends one wait and not the message, as Gloo's
  /// does. Throws at the deadline.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  [[nodiscard]] int sourceRank() const override { return peer_; }
  std::vector<at::Tensor> result() override { return {tensor_}; }

 private:
  friend class Messages;

  [[nodiscard]] bool is_send() const {
    return retrieveOpType() == c10d::OpType::SEND;
  }
  [[nodiscard]] size_t bytes() const { return tensor_.nbytes(); }
  [[nodiscard]] bool has_ended() { return Work::isCompleted(); }
  /// The first call counts.
  void end(const std::exception_ptr& error);

  const at::Tensor tensor_;
  const std::shared_ptr<Messages> messages_;

  const int tag_;
  bool aborted_ = false;  ///< with mutex_

  // These belong to `messages_`.
  int peer_;
  size_t bytes_posted_ = 0;
  int parts_under_way_ = 0;
};

}  // namespace lockstep::comm::mpi
