#include "comm/p2p/message_backend.h"

#include <string>

namespace lockstep::comm::p2p {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const at::Tensor& only(const std::vector<at::Tensor>& tensors,
                       const ErrorContext& context) {
  if (tensors.size() != 1) {
    throw InvalidArgument(
        "one tensor is needed, not " + std::to_string(tensors.size()), context);
  }
  return tensors[0];
}

void check_tensor(const at::Tensor& tensor, const ErrorContext& context) {
  if (!tensor.defined()) throw InvalidArgument("tensor is undefined", context);
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided ||
      !tensor.is_contiguous()) {
    throw InvalidArgument(
        "a contiguous dense tensor on the CPU is needed; "
        "call .cpu().contiguous()",
        context);
  }
}

}  // namespace

WorkPtr MessageBackend::send(std::vector<at::Tensor>& tensors,
                             int destination,
                             int tag) {
  return transfer(Direction::kSend,
                  only(tensors, error_context("send")),
                  destination,
                  tag,
                  kNoTimeout,
                  true);
}

WorkPtr MessageBackend::recv(std::vector<at::Tensor>& tensors,
                             int source,
                             int tag) {
  return transfer(Direction::kReceive,
                  only(tensors, error_context("recv")),
                  source,
                  tag,
                  kNoTimeout,
                  true);
}

WorkPtr MessageBackend::recvAnysource(std::vector<at::Tensor>& tensors,
                                      int tag) {
  return transfer(Direction::kReceive,
                  only(tensors, error_context("recv")),
                  std::nullopt,
                  tag,
                  kNoTimeout,
                  true);
}

WorkPtr MessageBackend::transfer(Direction direction,
                                 const at::Tensor& tensor,
                                 std::optional<int> peer,
                                 int tag,
                                 std::chrono::milliseconds timeout,
                                 bool async) {
  auto context = error_context(direction == Direction::kSend ? "send" : "recv");
  check_tensor(tensor, context);
  if (peer && (*peer < 0 || *peer >= size_)) {
    throw InvalidArgument("the peer is " + std::to_string(*peer) +
                              "; ranks are 0 to " + std::to_string(size_ - 1),
                          context);
  }
  if (tag < 0) {
    throw InvalidArgument(
        "tag is " + std::to_string(tag) + "; it must not be negative", context);
  }
  const auto carrier = messenger(context);
  const auto work = c10::make_intrusive<Transfer>(
      carrier,
      std::move(context),
      direction,
      tensor,
      peer,
      tag,
      timeout > kNoTimeout ? timeout : group_timeout());
  if (async) {
    carrier->start(work);
  } else {
    carrier->run(work);
  }
  return work;
}

}  // namespace lockstep::comm::p2p
