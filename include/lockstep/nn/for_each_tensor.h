#pragma once

#include <ATen/core/Tensor.h>

#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace lockstep::nn {

/// Calls `visit(const at::Tensor&)` for each tensor inside `value`: a tensor,
/// and any nesting of tuples, pairs, arrays, optionals, ranges (vector, map)
/// and `c10::IValue`s of one tensor. Other types are passed over.
template <class T, class Visit>
void for_each_tensor(const T& value, const Visit& visit) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    visit(static_cast<const at::Tensor&>(value));
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply(
        [&](const auto&... element) { (for_each_tensor(element, visit), ...); },
        value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) for_each_tensor(*value, visit);
  } else if constexpr (requires {
                         value.isTensor();
                         value.toTensor();
                       }) {
    if (value.isTensor()) visit(value.toTensor());
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
  } else if constexpr (std::ranges::input_range<const T&>) {
    for (const auto& element : value) for_each_tensor(element, visit);
  }
}

}  // namespace lockstep::nn
