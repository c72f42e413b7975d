#include "memory/allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>

#include "memory/arena.h"

namespace lockstep::memory {
namespace {

void free_slot(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  give_back_slot(data);
}

void free_block(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  block_cache().give_back(data);
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* previous) { previous_ = previous; }

  c10::DataPtr allocate(size_t bytes) override {
    if (void* data = take_slot(bytes)) return owned(data, bytes, &free_slot);
    if (void* data = bytes > 0 ? block_cache().take(bytes) : nullptr) {
      return owned(data, bytes, &free_block);
    }
    return previous_->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return previous_->raw_deleter() ? &raw_delete : nullptr;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    previous_->copy_data(to, from, bytes);
  }

 private:
  static c10::DataPtr owned(void* data, size_t bytes, c10::DeleterFnPtr free) {
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, free, c10::Device(c10::DeviceType::CPU)};
  }

  static void raw_delete(void* data) {
    if (is_slot(data)) {
      free_slot(data);
    } else if (block_cache().owns(data)) {
      free_block(data);
    } else {
      previous_->raw_deallocate(data);
    }
  }

  static inline c10::Allocator* previous_ = nullptr;
};

}  // namespace

void install_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetCPUAllocator(new Allocator(c10::GetCPUAllocator()));
  });
}

BlockCache& block_cache() noexcept {
  static auto* cache = new BlockCache;
  return *cache;
}

}  // namespace lockstep::memory
