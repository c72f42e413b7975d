#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_set>

namespace lockstep::memory {

/// Keeps freed blocks and hands them out again, as CUDA's caching allocator
/// does for device memory.
///
/// Blocks come in size classes, four between one power of two and the next; a
/// free block of a larger class serves too, up to twice the size, so that
/// varying sizes share few blocks. Before it takes more from the system than
/// 1.25 times the blocks that were ever in use at once, it gives free ones
/// back. Blocks of 4 MiB and more are aligned to huge pages and ask for them.
///
/// Thread safe. A block may be freed by any thread.
class BlockCache {
 public:
  BlockCache() = default;
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  static constexpr size_t kAlignment = 64;

  /// While off, as at first, nothing is handed out and freed blocks go to the
  /// system.
  void set_enabled(bool on) noexcept { enabled_ = on; }
  [[nodiscard]] bool enabled() const noexcept {
    return enabled_.load(std::memory_order_relaxed);
  }

  /// At least `bytes` bytes, aligned to `kAlignment`; null while off and where
  /// the system has no memory left.
  [[nodiscard]] void* take(size_t bytes) noexcept;
  /// Keeps the block, or returns it to the system.
  void give_back(void* data) noexcept;
  /// Whether `take` handed it out and nobody gave it back.
  [[nodiscard]] bool owns(const void* data);

  /// Of free blocks; unset: none but the rule above.
  void set_limit(std::optional<size_t> bytes) noexcept;
  /// Returns all free blocks to the system.
  void trim() noexcept;

  [[nodiscard]] size_t used_bytes() const noexcept { return used_; }
  [[nodiscard]] size_t free_bytes() const noexcept { return free_; }

 private:
  /// Lies before the data of each block.
  struct alignas(kAlignment) Header {
    Header* next = nullptr;
    size_t bytes = 0;  ///< of the data
    uint32_t size_class = 0;
    bool mapped = false;
  };
  struct FreeList {
    std::mutex mutex;
    std::atomic<Header*> head = nullptr;
  };

  static uint32_t class_of(size_t bytes) noexcept;
  static size_t bytes_of(uint32_t size_class) noexcept;
  Header* pop(uint32_t size_class) noexcept;
  void push(Header* block) noexcept;
  Header* make(uint32_t size_class) noexcept;
  void destroy(Header* block) noexcept;
  void make_room(size_t bytes) noexcept;
  void release_free(size_t bytes) noexcept;

  std::array<FreeList, 256> lists_;
  std::atomic<size_t> used_ = 0;
  std::atomic<size_t> peak_ = 0;  ///< of used_
  std::atomic<size_t> free_ = 0;
  std::atomic<size_t> limit_ = SIZE_MAX;
  std::atomic<bool> enabled_ = false;
  std::mutex blocks_mutex_;
  std::unordered_set<const void*> blocks_;  ///< the data of all
};

}  // namespace lockstep::memory
