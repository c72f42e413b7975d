#include "distributed/group.h"

#include <mutex>

namespace lockstep::distributed {
namespace {

struct ProcessSlot {
  std::mutex mutex;
  std::shared_ptr<Group> group;
};

ProcessSlot& process_slot() {
  static auto* const slot = new ProcessSlot;  // outlives static destructors
  return *slot;
}

thread_local bool is_rank = false;
thread_local std::shared_ptr<Group> thread_group;

}  // namespace

std::shared_ptr<Group> default_group() noexcept {
  if (is_rank) return thread_group;
  ProcessSlot& slot = process_slot();
  const std::lock_guard lock(slot.mutex);
  return slot.group;
}

std::shared_ptr<Group> require_default_group(const char* operation) {
  auto group = default_group();
  if (!group) {
    throw InvalidArgument("there is no group; call init_process_group first",
                          {.operation = operation});
  }
  return group;
}

std::shared_ptr<Group> exchange_default_group(std::shared_ptr<Group> group) {
  if (is_rank) return std::exchange(thread_group, std::move(group));
  ProcessSlot& slot = process_slot();
  const std::lock_guard lock(slot.mutex);
  return std::exchange(slot.group, std::move(group));
}

bool thread_is_rank() noexcept {
  return is_rank;
}

ThreadRank::ThreadRank() {
  is_rank = true;
}

ThreadRank::~ThreadRank() {
  thread_group.reset();
  is_rank = false;
}

}  // namespace lockstep::distributed
