#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lockstep/core/export.h"

namespace lockstep::data {

/// A data set that is read item by item: `size()` items, `get(i)` returns the
/// i-th as any type. A `DataLoader` with workers calls `get` from several
/// threads at once. Mirrors `torch.utils.data.Dataset`.
template <typename D>
concept ItemDataset = requires(D& dataset, int64_t index) {
  { dataset.size() } -> std::convertible_to<int64_t>;
  dataset.get(index);
};

/// A data set that makes a whole batch at once: `get_batch(indices)` takes the
/// items' indices (1-d, int64, on the CPU) and returns any type. Preferred over
/// `get` where a type has both. Mirrors a data set with `__getitems__`.
template <typename D>
concept BatchDataset = requires(D& dataset, const at::Tensor& indices) {
  { dataset.size() } -> std::convertible_to<int64_t>;
  dataset.get_batch(indices);
};

/// What a `DataLoader` reads.
template <typename D>
concept Dataset = ItemDataset<D> || BatchDataset<D>;

namespace detail {

/// The common first dimension. \throws InvalidArgument
LOCKSTEP_API int64_t common_size(const at::Tensor* tensors, size_t count);
/// Copies the rows `indices` of `tensor`.
LOCKSTEP_API at::Tensor gather(const at::Tensor& tensor,
                               const at::Tensor& indices);

}  // namespace detail

/// Tensors whose first dimension counts the items. Shares their memory; copies
/// of the data set do, too. Any dtype and device. Batches are copies: writing
/// to one leaves the data unchanged. Mirrors `torch.utils.data.TensorDataset`.
///
/// Thread safety: reads may run concurrently.
template <size_t N>
class TensorDataset {
  static_assert(N > 0, "TensorDataset needs at least one tensor");

 public:
  /// Item or batch: one tensor per data tensor; works with structured bindings.
  using Example = std::array<at::Tensor, N>;

  /// \throws InvalidArgument when a tensor is undefined or has no dimensions,
  ///     or the first dimensions differ
  template <std::same_as<at::Tensor>... Tensors>
  requires(sizeof...(Tensors) ==
           N) explicit TensorDataset(const Tensors&... tensors)
      : tensors_{tensors...}, size_(detail::common_size(tensors_.data(), N)) {}

  /// Number of items.
  [[nodiscard]] int64_t size() const { return size_; }

  /// Views of the item `index` in each tensor, without the first dimension.
  [[nodiscard]] Example get(int64_t index) const {
    Example item;
    for (size_t i = 0; i < N; ++i) item[i] = tensors_[i].select(0, index);
    return item;
  }

  /// Copies the items `indices` with one gather per tensor.
  [[nodiscard]] Example get_batch(const at::Tensor& indices) const {
    Example batch;
    for (size_t i = 0; i < N; ++i) {
      batch[i] = detail::gather(tensors_[i], indices);
    }
    return batch;
  }

  [[nodiscard]] const Example& tensors() const { return tensors_; }

 private:
  Example tensors_;
  int64_t size_;
};

template <typename... Tensors>
TensorDataset(const Tensors&...) -> TensorDataset<sizeof...(Tensors)>;

}  // namespace lockstep::data
