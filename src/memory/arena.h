#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/core/export.h"

namespace lockstep::memory {

struct ArenaState;

/// Places for large tensors in memory that other processes may write: the
/// gradients of one wrapper, born there during backward. Each place (slot)
/// serves allocations of exactly its size, so that little else than gradients
/// comes to lie there.
///
/// While a thread has the arena active, libtorch's CPU allocator hands out its
/// free slots, and everything else as before. A slot is free again when the
/// tensor's own deleter has run, and the mapping lives as long as a tensor in
/// it does, whatever becomes of the arena.
///
/// Exported for tests.
class LOCKSTEP_API Arena {
 public:
  /// `base` is the begin of the mapping that `memory` owns; slots follow each
  /// other from there, each rounded up to `kAlignment`.
  Arena(std::shared_ptr<void> memory,
        char* base,
        const std::vector<size_t>& slot_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  static constexpr size_t kAlignment = 4096;
  /// The bytes that slots of these sizes take.
  static size_t bytes(const std::vector<size_t>& slot_bytes);

  /// Serves allocations of the calling thread until `deactivate`. One arena at
  /// a time per thread: the last one wins.
  void activate() noexcept;
  /// Does nothing when another arena is active.
  void deactivate() noexcept;

  /// Where the tensor data that fills a whole slot of this arena lies, counted
  /// from `base`; unset for all other addresses.
  [[nodiscard]] std::optional<size_t> offset_of(const void* data,
                                                size_t bytes) const noexcept;

  /// Hands out no slot any more: a peer may still write there.
  void retire() noexcept;

 private:
  ArenaState* state_;
};

/// A free slot of exactly this size of the arena that the calling thread has
/// active; null where there is none.
[[nodiscard]] void* take_slot(size_t bytes) noexcept;
/// Whether the address lies in an arena.
[[nodiscard]] bool is_slot(const void* data) noexcept;
/// Of what `take_slot` gave, from any thread.
void give_back_slot(void* data) noexcept;

/// Bytes of all mappings alive, and those of slots in use.
struct ArenaUsage {
  size_t total = 0;
  size_t used = 0;
};
LOCKSTEP_API ArenaUsage arena_usage() noexcept;

}  // namespace lockstep::memory
