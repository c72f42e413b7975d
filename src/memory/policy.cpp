#include "memory/policy.h"

#include <mutex>

#include "core/env.h"
#include "lockstep/memory/memory.h"
#include "memory/allocator.h"
#include "memory/arena.h"

namespace lockstep::memory {
namespace {

constexpr char kVariable[] = "LOCKSTEP_MEMORY_POLICY";

std::mutex mutex;
bool enabled = false;
bool chosen_by_user = false;

void enable_locked(const Options& options) {
  if (!env::get_bool(kVariable).value_or(true)) return;
  install_allocator();
  block_cache().set_limit(options.limit_bytes);
  block_cache().set_enabled(true);
  enabled = true;
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
  block_cache().set_enabled(false);
  block_cache().trim();
  enabled = false;
}

void trim() {
  block_cache().trim();
}

Statistics statistics() {
  const auto arenas = arena_usage();
  const std::lock_guard lock(mutex);
  return {.enabled = enabled,
          .allocated_bytes = block_cache().used_bytes(),
          .cached_bytes = block_cache().free_bytes(),
          .arena_bytes = arenas.total,
          .arena_used_bytes = arenas.used};
}

}  // namespace lockstep::memory
