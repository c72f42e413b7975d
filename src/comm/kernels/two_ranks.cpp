#include "comm/kernels/two_ranks.h"

#include <cstdint>
#include <cstring>

#include "comm/kernels/cpu.h"
#include "comm/kernels/elementwise.h"

#ifdef __x86_64__
#define LOCKSTEP_AVX2_PREFETCHW [[gnu::target("avx2,fma,f16c,prfchw")]]
#endif

namespace lockstep::comm::kernels {
namespace {

constexpr size_t kLine = 64;
/// How far ahead lines are asked for.
constexpr size_t kAhead = 12 * kLine;

struct Average : Sum {};

/// Reduces a line into `to`.
template <class Op, class T>
[[gnu::always_inline]] inline void reduce_line(Loose<T>* to,
                                               const char* first,
                                               const char* second) {
  constexpr size_t kElements = kLine / sizeof(T);
  combine_loop<Op, T>(to,
                      reinterpret_cast<const Loose<T>*>(first),
                      reinterpret_cast<const Loose<T>*>(second),
                      kElements);
  if constexpr (std::is_same_v<Op, Average>) {
    for (size_t i = 0; i < kElements; ++i) to[i].value /= T{2};
  }
}

template <class Op, class T>
struct ExchangeLoop {
  [[gnu::always_inline]] static inline void run(const Exchange& e) {
    for (size_t i = 0; i < e.bytes; i += kLine) {
      __builtin_prefetch(e.give_to + i + kAhead, /*rw=*/1);
      __builtin_prefetch(e.give_from + i + kAhead);
      __builtin_prefetch(e.first + i + kAhead);
      __builtin_prefetch(e.second + i + kAhead);
      __builtin_prefetch(e.result + i + kAhead, /*rw=*/1);
      __builtin_prefetch(e.take_from + i + kAhead);
      std::memcpy(e.give_to + i, e.give_from + i, kLine);
      Loose<T> sum[kLine / sizeof(T)];
      reduce_line<Op, T>(sum, e.first + i, e.second + i);
      std::memcpy(e.own + i, sum, kLine);
      std::memcpy(e.result + i, sum, kLine);
      std::memcpy(e.take_to + i, e.take_from + i, kLine);
    }
  }
};

template <class Op, class T>
struct ReduceBothLoop {
  [[gnu::always_inline]] static inline void run(char* first,
                                                char* second,
                                                size_t bytes) {
    for (size_t i = 0; i < bytes; i += kLine) {
      __builtin_prefetch(first + i + kAhead, /*rw=*/1);
      __builtin_prefetch(second + i + kAhead, /*rw=*/1);
      Loose<T> sum[kLine / sizeof(T)];
      reduce_line<Op, T>(sum, first + i, second + i);
      std::memcpy(first + i, sum, kLine);
      std::memcpy(second + i, sum, kLine);
    }
  }
};

/// The loop for the CPU at hand.
template <class Loop, class... Arguments>
struct Compiled {
#ifdef __x86_64__
  LOCKSTEP_AVX2_PREFETCHW static void avx2(Arguments... arguments) {
    Loop::run(arguments...);
  }
#endif
  static void any(Arguments... arguments) {
    Loop::run(arguments...);
  }

  static auto choose() {
#ifdef __x86_64__
    if (has_avx2()) return &avx2;
#endif
    return &any;
  }
};

template <template <class, class> class Loop, class T, class... Arguments>
void (*kernel_of(ReduceOp op))(Arguments...) {
  switch (op) {
    case ReduceOp::SUM:
      return Compiled<Loop<Sum, T>, Arguments...>::choose();
    case ReduceOp::AVG:
      if constexpr (std::is_floating_point_v<T>) {
        return Compiled<Loop<Average, T>, Arguments...>::choose();
      }
      return nullptr;
    case ReduceOp::PRODUCT:
      return Compiled<Loop<Product, T>, Arguments...>::choose();
    case ReduceOp::MIN:
      return Compiled<Loop<Min, T>, Arguments...>::choose();
    case ReduceOp::MAX:
      return Compiled<Loop<Max, T>, Arguments...>::choose();
  }
  return nullptr;
}

template <template <class, class> class Loop, class... Arguments>
void (*kernel(ReduceOp op, c10::ScalarType dtype))(Arguments...) {
  using enum c10::ScalarType;
  switch (dtype) {
    case Float:
      return kernel_of<Loop, float, Arguments...>(op);
    case Double:
      return kernel_of<Loop, double, Arguments...>(op);
    case Int:
      return kernel_of<Loop, int32_t, Arguments...>(op);
    case Long:
      return kernel_of<Loop, int64_t, Arguments...>(op);
    default:
      return nullptr;
  }
}

}  // namespace

ExchangeKernel exchange_kernel(ReduceOp op, c10::ScalarType dtype) noexcept {
  return kernel<ExchangeLoop, const Exchange&>(op, dtype);
}

ReduceBothKernel reduce_both_kernel(ReduceOp op,
                                    c10::ScalarType dtype) noexcept {
  return kernel<ReduceBothLoop, char*, char*, size_t>(op, dtype);
}

}  // namespace lockstep::comm::kernels
