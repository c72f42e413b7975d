#include "comm/kernels/two_ranks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "comm/kernels/cpu.h"
#include "comm/kernels/elementwise.h"

namespace lockstep::comm::kernels {
namespace {

constexpr size_t kLine = kTwoRanksLine;
/// How far ahead lines are asked for: those in the other core's cache, and the
/// own ones, which may be in memory.
constexpr size_t kAhead = 12 * kLine;
constexpr size_t kFarAhead = 64 * kLine;

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
[[gnu::always_inline]] inline void exchange_loop(const Exchange& e) {
  for (size_t i = 0; i < e.bytes; i += kLine) {
    __builtin_prefetch(e.give_from + i + kFarAhead, /*rw=*/0, /*locality=*/2);
    __builtin_prefetch(e.own + i + kFarAhead, /*rw=*/0, /*locality=*/2);
    __builtin_prefetch(e.give_to + i + kAhead, /*rw=*/1);
    __builtin_prefetch(e.take_to + i + kAhead, /*rw=*/1);
    // Asked for to be written: later steps write where this one reads.
    __builtin_prefetch(e.peers + i + kAhead, /*rw=*/1);
    __builtin_prefetch(e.take_from + i + kAhead, /*rw=*/1);
    std::memcpy(e.give_to + i, e.give_from + i, kLine);
    Loose<T> reduced[kLine / sizeof(T)];
    if (e.own_is_first) {
      reduce_line<Op, T>(reduced, e.own + i, e.peers + i);
    } else {
      reduce_line<Op, T>(reduced, e.peers + i, e.own + i);
    }
    std::memcpy(e.own + i, reduced, kLine);
    std::memcpy(e.peers + i, reduced, kLine);
    std::memcpy(e.take_to + i, e.take_from + i, kLine);
  }
}

/// memcpy that accepts null pointers for nothing.
inline void copy_rest(char* to, const char* from, size_t done, size_t bytes) {
  if (done < bytes) std::memcpy(to + done, from + done, bytes - done);
}

[[gnu::always_inline]] inline void trade_loop(const Trade& t) {
  const size_t both = std::min(t.give_bytes, t.take_bytes) / kLine * kLine;
  for (size_t i = 0; i < both; i += kLine) {
    __builtin_prefetch(t.give_from + i + kFarAhead, /*rw=*/0, /*locality=*/2);
    __builtin_prefetch(t.give_to + i + kAhead, /*rw=*/1);
    __builtin_prefetch(t.take_from + i + kAhead);
    __builtin_prefetch(t.take_to + i + kAhead, /*rw=*/1);
    std::memcpy(t.give_to + i, t.give_from + i, kLine);
    std::memcpy(t.take_to + i, t.take_from + i, kLine);
  }
  copy_rest(t.give_to, t.give_from, both, t.give_bytes);
  copy_rest(t.take_to, t.take_from, both, t.take_bytes);
}

template <class T>
[[gnu::always_inline]] inline void average_both_loop(char* first,
                                                     char* second,
                                                     size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(first + i + kAhead, /*rw=*/1);
    __builtin_prefetch(second + i + kAhead, /*rw=*/1);
    Loose<T> average[kLine / sizeof(T)];
    reduce_line<Average, T>(average, first + i, second + i);
    std::memcpy(first + i, average, kLine);
    std::memcpy(second + i, average, kLine);
  }
}

#ifdef __x86_64__
template <class Op, class T>
LOCKSTEP_AVX2_PREFETCHW void exchange_avx2(const Exchange& exchange) {
  exchange_loop<Op, T>(exchange);
}

LOCKSTEP_AVX2_PREFETCHW void trade_avx2(const Trade& trade) {
  trade_loop(trade);
}

template <class T>
LOCKSTEP_AVX2_PREFETCHW void average_both_avx2(char* first,
                                               char* second,
                                               size_t bytes) {
  average_both_loop<T>(first, second, bytes);
}
#endif

template <class Op, class T>
void exchange_any(const Exchange& exchange) {
  exchange_loop<Op, T>(exchange);
}

template <class T>
void average_both_any(char* first, char* second, size_t bytes) {
  average_both_loop<T>(first, second, bytes);
}

template <class Op, class T>
ExchangeKernel exchange_for_cpu() {
#ifdef __x86_64__
  if (has_avx2()) return exchange_avx2<Op, T>;
#endif
  return exchange_any<Op, T>;
}

template <class T>
AverageBothKernel average_both_for_cpu() {
#ifdef __x86_64__
  if (has_avx2()) return average_both_avx2<T>;
#endif
  return average_both_any<T>;
}

template <class T>
ExchangeKernel exchange_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM:
      return exchange_for_cpu<Sum, T>();
    case ReduceOp::AVG:
      if constexpr (std::is_floating_point_v<T>) {
        return exchange_for_cpu<Average, T>();
      }
      return nullptr;
    case ReduceOp::PRODUCT:
      return exchange_for_cpu<Product, T>();
    case ReduceOp::MIN:
      return exchange_for_cpu<Min, T>();
    case ReduceOp::MAX:
      return exchange_for_cpu<Max, T>();
  }
  return nullptr;
}

}  // namespace

void trade(const Trade& trade) noexcept {
#ifdef __x86_64__
  if (has_avx2()) return trade_avx2(trade);
#endif
  trade_loop(trade);
}

ExchangeKernel exchange_kernel(ReduceOp op, c10::ScalarType dtype) noexcept {
  using enum c10::ScalarType;
  switch (dtype) {
    case Float:
      return exchange_of<float>(op);
    case Double:
      return exchange_of<double>(op);
    case Int:
      return exchange_of<int32_t>(op);
    case Long:
      return exchange_of<int64_t>(op);
    default:
      return nullptr;
  }
}

AverageBothKernel average_both_kernel(c10::ScalarType dtype) noexcept {
  using enum c10::ScalarType;
  switch (dtype) {
    case Float:
      return average_both_for_cpu<float>();
    case Double:
      return average_both_for_cpu<double>();
    default:
      return nullptr;
  }
}

}  // namespace lockstep::comm::kernels
