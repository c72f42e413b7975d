#include "comm/kernels/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "comm/kernels/cpu.h"
#include "comm/kernels/elementwise.h"
#include "comm/kernels/half.h"
#include "lockstep/core/error.h"

// Plain loops that the compiler vectorises (this file is built with -O3), once
// for every x86-64 and once with AVX2. Work goes in blocks of kBlock elements,
// so that intermediate values stay in the first-level cache.

namespace lockstep::comm::kernels {
namespace {

constexpr size_t kBlock = 1024;

#ifdef __x86_64__
template <class Op, class T>
LOCKSTEP_AVX2 void combine_avx2(Loose<T>* dst,
                                const Loose<T>* a,
                                const Loose<T>* b,
                                size_t n) {
  combine_loop<Op, T>(dst, a, b, n);
}
#endif

/// dst[i] = op(a[i], b[i]); dst may be a or b.
template <class Op, class T>
void combine(Loose<T>* dst, const Loose<T>* a, const Loose<T>* b, size_t n) {
#ifdef __x86_64__
  if (has_avx2()) return combine_avx2<Op, T>(dst, a, b, n);
#endif
  combine_loop<Op, T>(dst, a, b, n);
}

template <class T>
[[gnu::always_inline]] inline void divide_loop(Loose<T>* values,
                                               size_t n,
                                               T divisor) {
  for (size_t i = 0; i < n; ++i) {
    values[i].value = static_cast<T>(values[i].value / divisor);
  }
}

#ifdef __x86_64__
template <class T>
LOCKSTEP_AVX2 void divide_avx2(Loose<T>* values, size_t n, T divisor) {
  divide_loop<T>(values, n, divisor);
}
#endif

template <class T>
void divide(Loose<T>* values, size_t n, int divisor) {
  const auto by = static_cast<T>(divisor);
#ifdef __x86_64__
  if (has_avx2()) return divide_avx2<T>(values, n, by);
#endif
  divide_loop<T>(values, n, by);
}

struct Arguments {
  void* dst;
  const void* const* srcs;
  int n_srcs;
  size_t numel;
  bool average;
};

/// The average of integers that a double holds exactly, as it does the sum of
/// any number of ranks: it cannot overflow.
template <class T>
[[gnu::always_inline]] inline void average_loop(const Arguments& args) {
  double sum[kBlock];
  for (size_t start = 0; start < args.numel; start += kBlock) {
    const size_t n = std::min(kBlock, args.numel - start);
    std::fill_n(sum, n, 0.0);
    for (int s = 0; s < args.n_srcs; ++s) {
      const auto* source = static_cast<const Loose<T>*>(args.srcs[s]) + start;
      for (size_t i = 0; i < n; ++i) sum[i] += source[i].value;
    }
    auto* out = static_cast<Loose<T>*>(args.dst) + start;
    for (size_t i = 0; i < n; ++i) {
      out[i].value = static_cast<T>(sum[i] / args.n_srcs);
    }
  }
}

#ifdef __x86_64__
template <class T>
LOCKSTEP_AVX2 void average_avx2(const Arguments& args) {
  average_loop<T>(args);
}
#endif

template <class T>
void average(const Arguments& args) {
#ifdef __x86_64__
  if (has_avx2()) return average_avx2<T>(args);
#endif
  average_loop<T>(args);
}

template <class T>
void reduce_as(const Arguments& args, auto op) {
  using Op = decltype(op);
  if constexpr (std::is_integral_v<T> && sizeof(T) <= 4) {
    if (args.average) return average<T>(args);
  }
  Loose<T> accumulator[kBlock];
  for (size_t start = 0; start < args.numel; start += kBlock) {
    const size_t n = std::min(kBlock, args.numel - start);
    const auto source = [&](int s) {
      return static_cast<const Loose<T>*>(args.srcs[s]) + start;
    };
    auto* out = static_cast<Loose<T>*>(args.dst) + start;
    const Loose<T>* sum = source(0);
    for (int s = 1; s < args.n_srcs; ++s) {
      // dst may be a source, so it is written with the last one only.
      auto* into = s + 1 == args.n_srcs ? out : accumulator;
      combine<Op, T>(into, sum, source(s), n);
      sum = into;
    }
    if (args.average) divide<T>(out, n, args.n_srcs);
  }
}

template <class Format>
void reduce_in_float(const Arguments& args, auto op) {
  using Op = decltype(op);
  float accumulator[kBlock];
  float next[kBlock];
  auto* sum = reinterpret_cast<Loose<float>*>(accumulator);
  for (size_t start = 0; start < args.numel; start += kBlock) {
    const size_t n = std::min(kBlock, args.numel - start);
    const auto widen = [&](int s, float* into) {
      Format::widen(
          static_cast<const char*>(args.srcs[s]) + 2 * start, into, n);
    };
    widen(0, accumulator);
    for (int s = 1; s < args.n_srcs; ++s) {
      widen(s, next);
      combine<Op, float>(sum, sum, reinterpret_cast<Loose<float>*>(next), n);
    }
    if (args.average) divide<float>(sum, n, args.n_srcs);
    Format::narrow(accumulator, static_cast<char*>(args.dst) + 2 * start, n);
  }
}

void reduce_dtype(c10::ScalarType dtype, const Arguments& args, auto op) {
  using enum c10::ScalarType;
  switch (dtype) {
    case Float:
      return reduce_as<float>(args, op);
    case Double:
      return reduce_as<double>(args, op);
    case Half:
      return reduce_in_float<HalfFormat>(args, op);
    case BFloat16:
      return reduce_in_float<BFloat16Format>(args, op);
    case Byte:
    case Bool:
      return reduce_as<uint8_t>(args, op);
    case Char:
      return reduce_as<int8_t>(args, op);
    case Short:
      return reduce_as<int16_t>(args, op);
    case Int:
      return reduce_as<int32_t>(args, op);
    case Long:
      return reduce_as<int64_t>(args, op);
    case UInt16:
      return reduce_as<uint16_t>(args, op);
    case UInt32:
      return reduce_as<uint32_t>(args, op);
    case UInt64:
      return reduce_as<uint64_t>(args, op);
    default:
      return;
  }
}

}  // namespace

bool can_reduce(ReduceOp op, c10::ScalarType dtype) noexcept {
  using enum c10::ScalarType;
  switch (dtype) {
    case Float:
    case Double:
    case Half:
    case BFloat16:
    case Byte:
    case Char:
    case Short:
    case Int:
    case Long:
    case UInt16:
    case UInt32:
    case UInt64:
      return true;
    case Bool:
      return op == ReduceOp::MIN || op == ReduceOp::MAX;
    default:
      return false;
  }
}

void reduce(ReduceOp op,
            c10::ScalarType dtype,
            void* dst,
            const void* const* srcs,
            int n_srcs,
            size_t numel) {
  if (!can_reduce(op, dtype)) {
    throw Unsupported(std::string("values of type ") + c10::toString(dtype) +
                      (dtype == c10::ScalarType::Bool
                           ? " can only be reduced by MIN and MAX"
                           : " cannot be reduced"));
  }
  if (numel == 0) return;
  if (n_srcs == 1) {
    if (dst != srcs[0])
      std::memcpy(dst, srcs[0], numel * c10::elementSize(dtype));
    return;
  }
  const Arguments args{dst, srcs, n_srcs, numel, op == ReduceOp::AVG};
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
      return reduce_dtype(dtype, args, Sum{});
    case ReduceOp::PRODUCT:
      return reduce_dtype(dtype, args, Product{});
    case ReduceOp::MIN:
      return reduce_dtype(dtype, args, Min{});
    case ReduceOp::MAX:
      return reduce_dtype(dtype, args, Max{});
  }
}

}  // namespace lockstep::comm::kernels
