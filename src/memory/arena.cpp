#include "memory/arena.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "memory/allocator.h"

namespace lockstep::memory {

/// Bookkeeping of one arena. Never freed, since a thread may still have it
/// active; used again for a later arena.
struct ArenaState {
  struct Slot {
    char* data = nullptr;
    size_t bytes = 0;
    std::atomic<bool> used{false};
  };

  char* begin = nullptr;  ///< null when its arena and all tensors are gone
  char* end = nullptr;
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

  void give_back(Slot& slot) noexcept {
    slot.used.store(false, std::memory_order_release);
    release();
  }

  void release() noexcept;
};

namespace {

thread_local ArenaState* active = nullptr;

std::mutex states_mutex;  ///< for the list and the states' ranges
/// Not destroyed at exit, when tensors may still be alive.
std::vector<ArenaState*>& states = *new std::vector<ArenaState*>;

/// The arena whose memory holds the address.
ArenaState* find(const void* data) noexcept {
  const std::lock_guard lock(states_mutex);
  for (auto* state : states) {
    if (data >= state->begin && data < state->end) return state;
  }
  return nullptr;
}

size_t aligned(size_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment *
         Arena::kAlignment;
}

ArenaState* new_state(std::shared_ptr<void> memory,
                      char* base,
                      const std::vector<size_t>& slot_bytes) {
  const std::lock_guard lock(states_mutex);
  auto unused = std::ranges::find_if(
      states, [](const ArenaState* state) { return !state->begin; });
  if (unused == states.end()) {
    unused = states.insert(unused, new ArenaState);
  }
  auto& state = **unused;
  state.owners = 1;
  state.retired = false;
  state.memory = std::move(memory);
  state.slots = std::vector<ArenaState::Slot>(slot_bytes.size());
  state.begin = state.end = base;
  for (size_t i = 0; i < slot_bytes.size(); ++i) {
    state.slots[i].data = state.end;
    state.slots[i].bytes = slot_bytes[i];
    state.end += aligned(slot_bytes[i]);
  }
  return &state;
}

}  // namespace

void ArenaState::release() noexcept {
  if (owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  auto unmapped = std::move(memory);
  const std::lock_guard lock(states_mutex);
  begin = end = nullptr;
}

void* take_slot(size_t bytes) noexcept {
  return active ? active->take(bytes) : nullptr;
}

bool is_slot(const void* data) noexcept {
  return find(data) != nullptr;
}

void give_back_slot(void* data) noexcept {
  auto* state = find(data);
  state->give_back(*state->slot_at(data));
}

Arena::Arena(std::shared_ptr<void> memory,
             char* base,
             const std::vector<size_t>& slot_bytes)
    : state_(new_state(std::move(memory), base, slot_bytes)) {
  install_allocator();
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
  return static_cast<size_t>(slot->data - state_->begin);
}

void Arena::retire() noexcept {
  state_->retired.store(true, std::memory_order_relaxed);
}

ArenaUsage arena_usage() noexcept {
  ArenaUsage usage;
  const std::lock_guard lock(states_mutex);
  for (const auto* state : states) {
    if (!state->begin) continue;
    usage.total += static_cast<size_t>(state->end - state->begin);
    for (const auto& slot : state->slots) {
      if (slot.used.load(std::memory_order_relaxed)) usage.used += slot.bytes;
    }
  }
  return usage;
}

}  // namespace lockstep::memory
