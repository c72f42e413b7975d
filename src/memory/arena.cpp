#include "memory/arena.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace lockstep::memory {

/// Bookkeeping of one arena. Never freed, so that an address can be looked up
/// without a lock at any time; used again for a later arena.
struct ArenaState {
  struct Slot {
    char* data = nullptr;
    size_t bytes = 0;
    std::atomic<bool> used{false};
  };

  ArenaState* next = nullptr;
  std::atomic<bool> taken{true};  ///< belongs to an arena that is not gone
  std::atomic<char*> begin{nullptr};
  std::atomic<char*> end{nullptr};
  std::atomic<bool> retired{false};
  /// The arena itself and every slot in use.
  std::atomic<size_t> owners{0};
  std::shared_ptr<void> memory;
  std::vector<Slot> slots;

  void* take(size_t bytes) noexcept {
    if (retired.load(std::memory_order_relaxed)) return nullptr;
    for (auto& slot : slots) {
      if (slot.bytes != bytes || slot.used.load(std::memory_order_relaxed) ||
          slot.used.exchange(true, std::memory_order_acquire)) {
        continue;
      }
      owners.fetch_add(1, std::memory_order_relaxed);
      return slot.data;
    }
    return nullptr;
  }

  Slot* slot_at(const void* data) noexcept {
    for (auto& slot : slots) {
      if (slot.data == data) return &slot;
    }
    return nullptr;
  }

  void give_back(void* data) noexcept {
    slot_at(data)->used.store(false, std::memory_order_release);
    release();
  }

  void release() noexcept {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    begin = nullptr;
    end = nullptr;
    memory.reset();
    taken.store(false, std::memory_order_release);
  }
};

namespace {

std::atomic<ArenaState*> states{nullptr};
thread_local ArenaState* active = nullptr;

ArenaState* new_state() {
  for (auto* state = states.load(); state; state = state->next) {
    if (!state->taken.exchange(true, std::memory_order_acquire)) return state;
  }
  auto* state = new ArenaState;
  state->next = states.load();
  while (!states.compare_exchange_weak(state->next, state)) {
  }
  return state;
}

/// The arena whose memory holds the address.
ArenaState* find(const void* data) noexcept {
  for (auto* state = states.load(std::memory_order_acquire); state;
       state = state->next) {
    if (data >= state->begin.load(std::memory_order_acquire) &&
        data < state->end.load(std::memory_order_acquire)) {
      return state;
    }
  }
  return nullptr;
}

void free_slot(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  find(data)->give_back(data);
}

/// Serves the active arena's slots, and everything else from the allocator that
/// was there before.
class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(c10::Allocator* previous) { previous_ = previous; }

  c10::DataPtr allocate(size_t bytes) override {
    if (active) {
      if (void* data = active->take(bytes)) {
        c10::profiledCPUMemoryReporter().New(data, bytes);
        return {data, data, &free_slot, c10::Device(c10::DeviceType::CPU)};
      }
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
  static void raw_delete(void* data) {
    if (find(data)) {
      free_slot(data);
    } else {
      previous_->raw_deallocate(data);
    }
  }

  static inline c10::Allocator* previous_ = nullptr;
};

/// Never taken back and never destroyed: tensors outlive everything else.
void install_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetCPUAllocator(new ArenaAllocator(c10::GetCPUAllocator()));
  });
}

size_t aligned(size_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment *
         Arena::kAlignment;
}

}  // namespace

Arena::Arena(std::shared_ptr<void> memory,
             char* base,
             const std::vector<size_t>& slot_bytes)
    : state_(new_state()) {
  install_allocator();
  state_->owners = 1;
  state_->retired = false;
  state_->memory = std::move(memory);
  state_->slots = std::vector<ArenaState::Slot>(slot_bytes.size());
  char* data = base;
  for (size_t i = 0; i < slot_bytes.size(); ++i) {
    state_->slots[i].data = data;
    state_->slots[i].bytes = slot_bytes[i];
    data += aligned(slot_bytes[i]);
  }
  state_->begin = base;
  state_->end = data;
}

Arena::~Arena() {
  deactivate();
  retire();
  state_->release();
}

size_t Arena::bytes(const std::vector<size_t>& slot_bytes) {
  size_t sum = 0;
  for (const size_t one : slot_bytes) sum += aligned(one);
  return sum;
}

void Arena::activate() noexcept {
  active = state_;
}

void Arena::deactivate() noexcept {
  if (active == state_) active = nullptr;
}

std::optional<size_t> Arena::offset_of(const void* data,
                                       size_t bytes) const noexcept {
  const auto* slot = state_->slot_at(data);
  if (!slot || slot->bytes != bytes) return std::nullopt;
  return static_cast<size_t>(slot->data - state_->begin.load());
}

void Arena::retire() noexcept {
  state_->retired.store(true, std::memory_order_relaxed);
}

ArenaUsage arena_usage() noexcept {
  ArenaUsage usage;
  for (auto* state = states.load(std::memory_order_acquire); state;
       state = state->next) {
    usage.total += static_cast<size_t>(state->end.load() - state->begin.load());
    if (!state->begin.load()) continue;
    for (const auto& slot : state->slots) {
      if (slot.used.load(std::memory_order_relaxed)) usage.used += slot.bytes;
    }
  }
  return usage;
}

}  // namespace lockstep::memory
