#pragma once

#include <cstddef>

namespace lockstep::comm::kernels {

/// Conversions of `n` elements between IEEE half precision and float.
/// Narrowing rounds to nearest even. Pointers to 2-byte elements need no
/// alignment.
struct HalfFormat {
  static void widen(const void* src, float* dst, size_t n);
  static void narrow(const float* src, void* dst, size_t n);
};

/// The same for bfloat16. A NaN stays a NaN.
struct BFloat16Format {
  static void widen(const void* src, float* dst, size_t n);
  static void narrow(const float* src, void* dst, size_t n);
};

}  // namespace lockstep::comm::kernels
