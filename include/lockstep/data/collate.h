#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/export.h"

namespace lockstep::data {

namespace detail {

/// `torch.stack`.
LOCKSTEP_API at::Tensor stack(const std::vector<at::Tensor>& tensors);
/// A 1-d CPU tensor, not initialised.
LOCKSTEP_API at::Tensor empty(size_t count, at::ScalarType dtype);

template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

}  // namespace detail

/// Makes a batch of a non-empty list of items, as
/// `torch.utils.data.default_collate` does:
///
/// | item                           | batch                                 |
/// |--------------------------------|---------------------------------------|
/// | `at::Tensor` of shape S        | tensor of shape [items, S]            |
/// | `float`, `double`, `bool`      | 1-d tensor of that dtype              |
/// | any other integer              | 1-d int64 tensor                      |
/// | `std::tuple`, `pair`, `array`  | the same kind, each field collated    |
/// | any other type                 | `std::vector` of the items            |
struct DefaultCollate {
  template <typename Item>
  auto operator()(std::vector<Item> items) const {
    if constexpr (std::is_same_v<Item, at::Tensor>) {
      return detail::stack(items);
    } else if constexpr (std::is_arithmetic_v<Item>) {
      using Element = std::conditional_t<std::is_integral_v<Item> &&
                                             !std::is_same_v<Item, bool>,
                                         int64_t,
                                         Item>;
      auto batch =
          detail::empty(items.size(), c10::CppTypeToScalarType<Element>::value);
      std::copy(items.begin(),
                items.end(),
                static_cast<Element*>(batch.mutable_data_ptr()));
      return batch;
    } else if constexpr (detail::TupleLike<Item>) {
      return fields(std::move(items),
                    std::make_index_sequence<std::tuple_size_v<Item>>());
    } else {
      return items;
    }
  }

 private:
  template <size_t I, typename Item>
  auto field(std::vector<Item>& items) const {
    std::vector<std::tuple_element_t<I, Item>> column;
    column.reserve(items.size());
    for (auto& item : items) column.push_back(std::move(std::get<I>(item)));
    return (*this)(std::move(column));
  }

  template <typename Item, size_t... I>
  auto fields(std::vector<Item> items, std::index_sequence<I...>) const {
    return make(std::type_identity<Item>(), field<I>(items)...);
  }

  template <typename... T, typename... Columns>
  static auto make(std::type_identity<std::tuple<T...>>, Columns... columns) {
    return std::tuple<Columns...>(std::move(columns)...);
  }
  template <typename A, typename B, typename X, typename Y>
  static auto make(std::type_identity<std::pair<A, B>>, X x, Y y) {
    return std::pair<X, Y>(std::move(x), std::move(y));
  }
  template <typename T, size_t N, typename... Columns>
  static auto make(std::type_identity<std::array<T, N>>, Columns... columns) {
    return std::array{std::move(columns)...};
  }
};

}  // namespace lockstep::data
