#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "comm/backends/shm/layout.h"

namespace lockstep::comm::shm {

/// A stretch of `count` elements.
struct Range {
  size_t start;
  size_t count;
};

constexpr size_t ceil_div(size_t a, size_t b) {
  return (a + b - 1) / b;
}

/// The i-th of `parts` stretches of equal length (the last ones may be shorter
/// or empty) that start at multiples of `lines` cache lines.
inline Range part(size_t numel,
                  size_t parts,
                  size_t i,
                  size_t element_size,
                  size_t lines = 1) {
  const size_t grain = lines * Layout::kLine / element_size;
  const size_t length = ceil_div(ceil_div(numel, parts), grain) * grain;
  const size_t start = std::min(i * length, numel);
  return {start, std::min(length, numel - start)};
}

/// memcpy that accepts null pointers for nothing.
inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace lockstep::comm::shm
