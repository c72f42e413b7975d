#include "comm/kernels/half.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "comm/kernels/cpu.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace lockstep::comm::kernels {
namespace {

uint16_t load(const void* src, size_t i) {
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(src) + 2 * i, 2);
  return bits;
}

void store(void* dst, size_t i, uint16_t bits) {
  std::memcpy(static_cast<char*>(dst) + 2 * i, &bits, 2);
}

template <class T>
void widen_each(const void* src, float* dst, size_t start, size_t n) {
  for (size_t i = start; i < n; ++i) dst[i] = T(load(src, i), T::from_bits());
}

template <class T>
void narrow_each(const float* src, void* dst, size_t start, size_t n) {
  for (size_t i = start; i < n; ++i) store(dst, i, T(src[i]).x);
}

[[gnu::always_inline]] inline float widen_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

[[gnu::always_inline]] inline uint16_t narrow_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

#ifdef __x86_64__
LOCKSTEP_AVX2 size_t widen_half_avx2(const void* src, float* dst, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const auto* from = static_cast<const char*>(src) + 2 * i;
    const __m128i bits =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(bits));
  }
  return i;
}

LOCKSTEP_AVX2 size_t narrow_half_avx2(const float* src, void* dst, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits =
        _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    auto* to = static_cast<char*>(dst) + 2 * i;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
  }
  return i;
}

LOCKSTEP_AVX2 void widen_bfloat16_avx2(const void* src, float* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = widen_bfloat16(load(src, i));
}

LOCKSTEP_AVX2 void narrow_bfloat16_avx2(const float* src, void* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) store(dst, i, narrow_bfloat16(src[i]));
}
#endif

}  // namespace

void HalfFormat::widen(const void* src, float* dst, size_t n) {
  size_t done = 0;
#ifdef __x86_64__
  if (has_avx2()) done = widen_half_avx2(src, dst, n);
#endif
  widen_each<c10::Half>(src, dst, done, n);
}

void HalfFormat::narrow(const float* src, void* dst, size_t n) {
  size_t done = 0;
#ifdef __x86_64__
  if (has_avx2()) done = narrow_half_avx2(src, dst, n);
#endif
  narrow_each<c10::Half>(src, dst, done, n);
}

void BFloat16Format::widen(const void* src, float* dst, size_t n) {
#ifdef __x86_64__
  if (has_avx2()) return widen_bfloat16_avx2(src, dst, n);
#endif
  for (size_t i = 0; i < n; ++i) dst[i] = widen_bfloat16(load(src, i));
}

void BFloat16Format::narrow(const float* src, void* dst, size_t n) {
#ifdef __x86_64__
  if (has_avx2()) return narrow_bfloat16_avx2(src, dst, n);
#endif
  for (size_t i = 0; i < n; ++i) store(dst, i, narrow_bfloat16(src[i]));
}

}  // namespace lockstep::comm::kernels
