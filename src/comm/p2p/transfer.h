#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "core/clock.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::p2p {

class Messenger;

enum class Direction { kSend, kReceive };

/// One send or receive of a contiguous CPU tensor, which it keeps alive.
///
/// Thread safety: the members of Work; the others belong to the messenger.
class Transfer final : public c10d::Work {
 public:
  /// Receives without a peer take from any rank. `context` names the operation.
  Transfer(std::shared_ptr<Messenger> messenger,
           ErrorContext context,
           Direction direction,
           at::Tensor tensor,
           std::optional<int> peer,
           int tag,
           std::chrono::milliseconds timeout);

  bool isCompleted() override { return ended(); }
  /// Throws the transfer's error, or TimeoutError when it has not ended within
  /// `timeout` (none for `kNoTimeout`); then it goes on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return {tensor_}; }
  /// Its value is the list of the one tensor.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// Of a receive, once it ended well.
  int sourceRank() const override { return ended() ? peer_.value_or(-1) : -1; }

  [[nodiscard]] bool ended() const {
    return ended_.load(std::memory_order_acquire);
  }
  [[nodiscard]] Direction direction() const { return direction_; }
  [[nodiscard]] std::optional<int> peer() const { return peer_; }
  /// Of a receive from any rank, once it has met its message.
  void set_peer(int peer) { peer_ = peer; }
  [[nodiscard]] int tag() const { return tag_; }
  [[nodiscard]] char* data() const {
    return static_cast<char*>(tensor_.data_ptr());
  }
  [[nodiscard]] size_t bytes() const { return tensor_.nbytes(); }
  [[nodiscard]] uint64_t numel() const {
    return static_cast<uint64_t>(tensor_.numel());
  }
  [[nodiscard]] c10::ScalarType dtype() const { return tensor_.scalar_type(); }
  [[nodiscard]] const Deadline& deadline() const { return deadline_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }
  [[nodiscard]] const ErrorContext& context() const { return context_; }

  /// Called once; null: success. Whether `complete_future` must be called then,
  /// which runs callbacks: hold no lock.
  [[nodiscard]] bool end(std::exception_ptr error) noexcept;
  void complete_future() const;

 private:
  const std::shared_ptr<Messenger> messenger_;
  const ErrorContext context_;
  const Direction direction_;
  const at::Tensor tensor_;
  std::optional<int> peer_;
  const int tag_;
  const std::chrono::milliseconds timeout_;
  const Deadline deadline_;
  std::atomic<bool> ended_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using TransferPtr = c10::intrusive_ptr<Transfer>;

/// Carries the transfers of one backend.
///
/// Thread safety: all members.
class Messenger {
 public:
  virtual ~Messenger() = default;
  /// Takes up a transfer, which then ends without the caller's help, at its
  /// deadline at the latest. Throws BackendError.
  virtual void start(const TransferPtr& transfer) = 0;
  /// The same in the caller, and returns when it has ended.
  virtual void run(const TransferPtr& transfer) = 0;
  /// Returns when the transfer has ended or `limit` has passed; zero: none.
  virtual void wait(const Transfer& transfer,
                    std::chrono::milliseconds limit) = 0;
};

}  // namespace lockstep::comm::p2p
