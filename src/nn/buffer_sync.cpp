#include "nn/buffer_sync.h"

#include <ATen/ATen.h>

#include "distributed/convert_error.h"
#include "distributed/group.h"

namespace lockstep::nn {

BufferSync::BufferSync(std::shared_ptr<distributed::Group> group,
                       const std::vector<NamedTensor>& buffers)
    : group_(std::move(group)) {
  for (const auto& named : buffers) {
    if (named.tensor.numel() > 0) buffers_.push_back(named.tensor);
  }
}

void BufferSync::broadcast() {
  if (buffers_.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (const auto& buffer : buffers_) {
    parts.push_back(buffer.variable_data().reshape(-1).view(at::kByte));
  }
  std::vector<at::Tensor> message{at::cat(parts)};
  try {
    group_->backend->broadcast(message, {})->wait(group_->timeout);
  } catch (...) {
    distributed::rethrow_converted(group_->context("forward (buffers)"));
  }
  if (group_->rank == 0) return;
  int64_t offset = 0;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    auto values = message[0].narrow(0, offset, parts[i].numel());
    offset += parts[i].numel();
    auto target = buffers_[i].variable_data();
    target.copy_(
        values.clone().view(target.scalar_type()).view(target.sizes()));
  }
}

}  // namespace lockstep::nn
