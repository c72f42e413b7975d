#include "lockstep/data/dataset.h"

#include "lockstep/core/error.h"

namespace lockstep::data::detail {

int64_t common_size(const at::Tensor* tensors, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto name = "TensorDataset: tensor " + std::to_string(i);
    if (!tensors[i].defined()) throw InvalidArgument(name + " is undefined");
    if (tensors[i].dim() == 0) {
      throw InvalidArgument(
          name + " has no dimensions; the first one must count the items");
    }
    if (tensors[i].size(0) != tensors[0].size(0)) {
      throw InvalidArgument(
          name + " has " + std::to_string(tensors[i].size(0)) +
          " items, but tensor 0 has " + std::to_string(tensors[0].size(0)));
    }
  }
  return tensors[0].size(0);
}

at::Tensor gather(const at::Tensor& tensor, const at::Tensor& indices) {
  return tensor.index_select(
      0, tensor.is_cpu() ? indices : indices.to(tensor.device()));
}

}  // namespace lockstep::data::detail
