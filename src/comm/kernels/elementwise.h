#pragma once

#include <cstddef>
#include <type_traits>

namespace lockstep::comm::kernels {

/// An element at any address.
template <class T>
struct [[gnu::packed, gnu::may_alias]] Loose {
  T value;
};

/// Integer sums and products wrap: unsigned arithmetic defines that.
template <class T>
auto wrapping(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return value;
  } else if constexpr (sizeof(T) < sizeof(unsigned)) {
    return static_cast<unsigned>(value);
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(wrapping(a) + wrapping(b));
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(wrapping(a) * wrapping(b));
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return (b < a) | (b != b) ? b : a;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return (b > a) | (b != b) ? b : a;
  }
};

/// dst[i] = op(a[i], b[i]); dst may be a or b.
template <class Op, class T>
[[gnu::always_inline]] inline void combine_loop(Loose<T>* dst,
                                                const Loose<T>* a,
                                                const Loose<T>* b,
                                                size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    dst[i].value = Op::template apply<T>(a[i].value, b[i].value);
  }
}

}  // namespace lockstep::comm::kernels
