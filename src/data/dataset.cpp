#include "lockstep/data/dataset.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep::data::detail {
namespace {

/// Whether its memory is its values, row by row.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.is_contiguous() && !tensor.requires_grad() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.is_quantized();
}

template <size_t kBytes>
void copy_rows_of(char* to,
                  const char* from,
                  const int64_t* index,
                  int64_t count) {
  for (int64_t i = 0; i < count; ++i, to += kBytes) {
    std::memcpy(to, from + static_cast<size_t>(index[i]) * kBytes, kBytes);
  }
}

/// What `index_select` does, for small batches in a third of the time.
void copy_rows(char* to,
               const char* from,
               const int64_t* index,
               int64_t count,
               size_t bytes) {
  if (bytes == 4) return copy_rows_of<4>(to, from, index, count);
  if (bytes == 8) return copy_rows_of<8>(to, from, index, count);
  for (int64_t i = 0; i < count; ++i, to += bytes) {
    std::memcpy(to, from + static_cast<size_t>(index[i]) * bytes, bytes);
  }
}

}  // namespace

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
  if (!is_plain(tensor) || !is_plain(indices) || indices.dim() != 1 ||
      indices.scalar_type() != at::kLong) {
    return tensor.index_select(
        0, tensor.is_cpu() ? indices : indices.to(tensor.device()));
  }
  const int64_t count = indices.numel();
  const auto* index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (index[i] < 0 || index[i] >= tensor.size(0)) {
      throw InvalidArgument("TensorDataset: index " + std::to_string(index[i]) +
                            " is out of range for " +
                            std::to_string(tensor.size(0)) + " items");
    }
  }
  auto sizes = tensor.sizes().vec();
  sizes[0] = count;
  auto result = at::empty(sizes, tensor.options());
  if (result.numel() > 0) {
    copy_rows(static_cast<char*>(result.mutable_data_ptr()),
              static_cast<const char*>(tensor.const_data_ptr()),
              index,
              count,
              result.nbytes() / static_cast<size_t>(count));
  }
  return result;
}

}  // namespace lockstep::data::detail
