#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/p2p/transfer.h"

namespace lockstep::comm::p2p {

/// A backend whose sends and receives a messenger carries: each has a time
/// limit of its own, may go to the own rank, and shows its dtype to the other
/// side.
class MessageBackend : public c10d::Backend {
 public:
  using Backend::Backend;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors,
                                      int destination,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors,
                                      int source,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors,
                                               int tag) override;

  /// No peer: receives from any rank. Timeout zero or less: the group's. With
  /// `async` it is under way then, else it has ended.
  c10::intrusive_ptr<c10d::Work> transfer(Direction direction,
                                          const at::Tensor& tensor,
                                          std::optional<int> peer,
                                          int tag,
                                          std::chrono::milliseconds timeout,
                                          bool async);

 protected:
  /// How errors of `operation` begin.
  [[nodiscard]] virtual ErrorContext error_context(
      const char* operation) const = 0;
  [[nodiscard]] virtual std::chrono::milliseconds group_timeout() const = 0;
  /// Throws where the group may not be used any more.
  virtual std::shared_ptr<Messenger> messenger(const ErrorContext& context) = 0;
};

}  // namespace lockstep::comm::p2p
