#include "memory/policy.h"

#include <malloc.h>

#include <algorithm>
#include <climits>
#include <mutex>

#include "core/env.h"
#include "lockstep/memory/memory.h"
#include "memory/arena.h"

namespace lockstep::memory {
namespace {

constexpr char kVariable[] = "LOCKSTEP_MEMORY_POLICY";

// glibc's own values, from mallopt(3).
constexpr int kDefaultMmapMax = 65536;
constexpr int kDefaultTrimThreshold = 128 * 1024;
constexpr int kNeverTrim = -1;

std::mutex mutex;
bool enabled = false;
bool chosen_by_user = false;

void enable_locked(const Options& options) {
  if (!env::get_bool(kVariable).value_or(true)) return;
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD,
            options.limit_bytes ? static_cast<int>(std::min<size_t>(
                                      *options.limit_bytes, INT_MAX))
                                : kNeverTrim);
  enabled = true;
#endif
}

}  // namespace

void enable(const Options& options) {
  const std::lock_guard lock(mutex);
  chosen_by_user = true;
  enable_locked(options);
}

void enable_by_default() {
  const std::lock_guard lock(mutex);
  if (!chosen_by_user && !enabled) enable_locked({});
}

void disable() {
  const std::lock_guard lock(mutex);
  chosen_by_user = true;
  if (!enabled) return;
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, kDefaultMmapMax);
  ::mallopt(M_TRIM_THRESHOLD, kDefaultTrimThreshold);
#endif
  enabled = false;
  trim();
}

void trim() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

Statistics statistics() {
  Statistics result;
#ifdef __GLIBC__
  const auto info = ::mallinfo2();
  result.allocated_bytes = info.uordblks + info.hblkhd;
  result.cached_bytes = info.fordblks;
#endif
  const auto arenas = arena_usage();
  result.arena_bytes = arenas.total;
  result.arena_used_bytes = arenas.used;
  const std::lock_guard lock(mutex);
  result.enabled = enabled;
  return result;
}

}  // namespace lockstep::memory
