#include "memory/block_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

namespace lockstep::memory {
namespace {

constexpr size_t kSmallPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kHuge = size_t{4} << 20;
/// From this size on a larger block may serve a request.
constexpr size_t kSharing = size_t{64} << 10;
constexpr uint32_t kClassesPerOctave = 4;
constexpr int kSmallestBits = 6;

/// Memory aligned to huge pages behind one small page; the address of the
/// former. The kernel aligns to small pages only.
char* map(size_t bytes) noexcept {
  const size_t size = kSmallPage + kHugePage + bytes;
  void* mapped = ::mmap(nullptr,
                        size,
                        PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS,
                        -1,
                        0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<char*>(mapped);
  const auto first = reinterpret_cast<uintptr_t>(begin) + kSmallPage;
  char* const data =
      begin + kSmallPage + (kHugePage - first % kHugePage) % kHugePage;
  if (data - kSmallPage > begin) {
    ::munmap(begin, static_cast<size_t>(data - kSmallPage - begin));
  }
  char* const end = data + bytes;
  if (end < begin + size)
    ::munmap(end, static_cast<size_t>(begin + size - end));
  ::madvise(data, bytes, MADV_HUGEPAGE);
  return data;
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
  const uint32_t size_class = class_of(bytes);
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
  char* data = nullptr;
  if (mapped) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    data = map(bytes);
  } else if (void* memory = nullptr;
             ::posix_memalign(&memory, kAlignment, sizeof(Header) + bytes) ==
             0) {
    data = static_cast<char*>(memory) + sizeof(Header);
  }
  if (!data) return nullptr;
  auto* block = new (data - sizeof(Header))
      Header{.bytes = bytes, .size_class = size_class, .mapped = mapped};
  try {
    const std::lock_guard lock(blocks_mutex_);
    blocks_.insert(data);
  } catch (const std::bad_alloc&) {
    destroy(block);
    return nullptr;
  }
  return block;
}

void BlockCache::destroy(Header* block) noexcept {
  auto* data = reinterpret_cast<char*>(block + 1);
  {
    const std::lock_guard lock(blocks_mutex_);
    blocks_.erase(data);
  }
  if (block->mapped) {
    ::munmap(data - kSmallPage, kSmallPage + block->bytes);
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
