#include "lockstep/data/collate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

namespace lockstep::data::detail {

at::Tensor stack(const std::vector<at::Tensor>& tensors) {
  return at::stack(tensors);
}

at::Tensor empty(size_t count, at::ScalarType dtype) {
  return at::empty({static_cast<int64_t>(count)},
                   at::TensorOptions(dtype).device(at::kCPU));
}

}  // namespace lockstep::data::detail
