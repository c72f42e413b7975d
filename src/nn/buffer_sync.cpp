#include "nn/buffer_sync.h"

#include <ATen/ATen.h>

#include <cstring>

#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "nn/messages.h"

namespace lockstep::nn {
namespace {

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_cpu() && from.is_cpu() && to.is_contiguous() &&
      from.is_contiguous()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.variable_data().copy_(from);
  }
}

/// Where the next part can begin, whatever its dtype.
int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlignment = 16;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

BufferSync::BufferSync(std::shared_ptr<distributed::Group> group,
                       const std::vector<NamedTensor>& buffers)
    : group_(std::move(group)) {
  int64_t bytes = 0;
  for (const auto& named : buffers) {
    if (named.tensor.numel() == 0) continue;
    buffers_.push_back(named);
    bytes = aligned(bytes) + static_cast<int64_t>(named.tensor.nbytes());
  }
  message_ = at::zeros({bytes}, at::kByte);
  int64_t offset = 0;
  for (const auto& [name, buffer] : buffers_) {
    const auto size = static_cast<int64_t>(buffer.nbytes());
    parts_.push_back(message_.narrow(0, aligned(offset), size)
                         .view(buffer.scalar_type())
                         .view(buffer.sizes()));
    offset = aligned(offset) + size;
  }
}

void BufferSync::broadcast() {
  if (buffers_.empty()) return;
  check_not_converted();
  const at::NoGradGuard no_grad;
  if (group_->rank == 0) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      copy_values(parts_[i], buffers_[i].tensor);
    }
  }
  std::vector<at::Tensor> message{message_};
  c10d::BroadcastOptions options;
  options.asyncOp = false;
  try {
    group_->backend->broadcast(message, options)->wait();
  } catch (...) {
    group_->note_failure();
    distributed::rethrow_converted(group_->context("forward (buffers)"));
  }
  if (group_->rank == 0) return;
  for (size_t i = 0; i < parts_.size(); ++i) {
    copy_values(buffers_[i].tensor, parts_[i]);
  }
}

void BufferSync::check_not_converted() const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto& [name, buffer] = buffers_[i];
    if (buffer.scalar_type() != parts_[i].scalar_type() ||
        buffer.sizes() != parts_[i].sizes()) {
      throw InvalidArgument(converted_message("buffer", name),
                            group_->context("forward (buffers)"));
    }
  }
}

}  // namespace lockstep::nn
