#include "memory/block_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

namespace lockstep::memory {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kHuge = size_t{4} << 20;
/// From this size on a larger block may serve a request.
constexpr size_t kSharing = size_t{64} << 10;
constexpr uint32_t kClassesPerOctave = 4;
constexpr int kSmallestBits = 7;

char* map(size_t bytes) noexcept {
  // Aligned by hand: the kernel aligns to small pages only.
  const size_t with_slack = bytes + kHugePage;
  void* mapped = ::mmap(nullptr,
                        with_slack,
                        PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS,
                        -1,
                        0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const size_t before = aligned - begin;
  if (before > 0) ::munmap(mapped, before);
  auto* block = reinterpret_cast<char*>(aligned);
  if (before < kHugePage) ::munmap(block + bytes, kHugePage - before);
  ::madvise(block, bytes, MADV_HUGEPAGE);
  return block;
}

}  // namespace

uint32_t BlockCache::class_of(size_t bytes) noexcept {
  if (bytes <= size_t{1} << kSmallestBits) return 0;
  const auto octave = static_cast<uint32_t>(std::bit_width(bytes - 1)) - 1;
  const size_t step = (size_t{1} << octave) / kClassesPerOctave;
  const size_t above = bytes - 1 - (size_t{1} << octave);
  return 1 + (octave - kSmallestBits) * kClassesPerOctave +
         static_cast<uint32_t>(above / step);
}

size_t BlockCache::bytes_of(uint32_t size_class) noexcept {
  if (size_class == 0) return size_t{1} << kSmallestBits;
  const uint32_t octave = (size_class - 1) / kClassesPerOctave + kSmallestBits;
  const size_t step = (size_t{1} << octave) / kClassesPerOctave;
  return (size_t{1} << octave) +
         ((size_class - 1) % kClassesPerOctave + 1) * step;
}

void* BlockCache::take(size_t bytes) noexcept {
  if (!enabled() || bytes > SIZE_MAX / 4) return nullptr;
  const uint32_t size_class = class_of(bytes + sizeof(Header));
  Header* block = pop(size_class);
  if (!block && bytes >= kSharing) {
    for (uint32_t more = 1; !block && more <= kClassesPerOctave; ++more) {
      block = pop(size_class + more);
    }
  }
  if (!block) {
    make_room(bytes_of(size_class));
    block = make(size_class);
    if (!block) {
      trim();
      block = make(size_class);
    }
    if (!block) return nullptr;
  }
  const size_t used = used_.fetch_add(block->bytes) + block->bytes;
  size_t peak = peak_.load(std::memory_order_relaxed);
  while (used > peak && !peak_.compare_exchange_weak(peak, used)) {
  }
  return block + 1;
}

void BlockCache::give_back(void* data) noexcept {
  auto* block = static_cast<Header*>(data) - 1;
  used_.fetch_sub(block->bytes);
  if (enabled() && free_.load(std::memory_order_relaxed) + block->bytes <=
                       limit_.load(std::memory_order_relaxed)) {
    push(block);
  } else {
    destroy(block);
  }
}

bool BlockCache::owns(const void* data) {
  const std::lock_guard lock(blocks_mutex_);
  return blocks_.contains(data);
}

void BlockCache::set_limit(std::optional<size_t> bytes) noexcept {
  limit_ = bytes.value_or(SIZE_MAX);
  if (free_ > limit_) release_free(free_ - limit_);
}

void BlockCache::trim() noexcept {
  release_free(SIZE_MAX);
}

BlockCache::Header* BlockCache::pop(uint32_t size_class) noexcept {
  auto& list = lists_[size_class];
  if (!list.head.load(std::memory_order_relaxed)) return nullptr;
  const std::lock_guard lock(list.mutex);
  Header* block = list.head.load(std::memory_order_relaxed);
  if (!block) return nullptr;
  list.head.store(block->next, std::memory_order_relaxed);
  free_.fetch_sub(block->bytes);
  return block;
}

void BlockCache::push(Header* block) noexcept {
  auto& list = lists_[block->size_class];
  const std::lock_guard lock(list.mutex);
  block->next = list.head.load(std::memory_order_relaxed);
  list.head.store(block, std::memory_order_relaxed);
  free_.fetch_add(block->bytes);
}

BlockCache::Header* BlockCache::make(uint32_t size_class) noexcept {
  size_t bytes = bytes_of(size_class);
  const bool mapped = bytes >= kHuge;
  void* memory = nullptr;
  if (mapped) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    memory = map(bytes);
  } else if (::posix_memalign(&memory, kAlignment, bytes) != 0) {
    memory = nullptr;
  }
  if (!memory) return nullptr;
  auto* block = new (memory)
      Header{.bytes = bytes, .size_class = size_class, .mapped = mapped};
  try {
    const std::lock_guard lock(blocks_mutex_);
    blocks_.insert(block + 1);
  } catch (const std::bad_alloc&) {
    destroy(block);
    return nullptr;
  }
  return block;
}

void BlockCache::destroy(Header* block) noexcept {
  {
    const std::lock_guard lock(blocks_mutex_);
    blocks_.erase(block + 1);
  }
  if (block->mapped) {
    ::munmap(block, block->bytes);
  } else {
    std::free(block);
  }
}

/// Before `bytes` more are taken from the system.
void BlockCache::make_room(size_t bytes) noexcept {
  const size_t used = used_ + bytes;
  const size_t most = std::max<size_t>(peak_, used);
  const size_t allowed = most + most / 4;
  const size_t total = used + free_;
  if (total > allowed) release_free(total - allowed);
}

/// Of the largest first.
void BlockCache::release_free(size_t bytes) noexcept {
  size_t released = 0;
  for (auto size_class = static_cast<uint32_t>(lists_.size());
       size_class-- > 0 && released < bytes;) {
    while (released < bytes) {
      Header* block = pop(size_class);
      if (!block) break;
      released += block->bytes;
      destroy(block);
    }
  }
}

}  // namespace lockstep::memory
