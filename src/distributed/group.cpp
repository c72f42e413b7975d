#include "distributed/group.h"

#include <pthread.h>

#include <mutex>
#include <vector>

namespace lockstep::distributed {
namespace {

struct ProcessSlot {
  std::mutex mutex;
  std::shared_ptr<Group> group;
  /// Of the process that this one was forked from: never freed, since its
  /// threads are not here and its connections are not ours to close.
  std::vector<std::shared_ptr<Group>> of_parent;

  ProcessSlot();
};

ProcessSlot& process_slot() {
  static auto* const slot = new ProcessSlot;  // outlives static destructors
  return *slot;
}

thread_local bool is_rank = false;
thread_local std::shared_ptr<Group> thread_group;

void give_up_groups_in_child() {
  ProcessSlot& slot = process_slot();
  for (auto* group : {&slot.group, &thread_group}) {
    if (!*group) continue;
    (*group)->destroyed = true;
    slot.of_parent.push_back(std::move(*group));
  }
  slot.mutex.unlock();
}

ProcessSlot::ProcessSlot() {
  ::pthread_atfork([] { process_slot().mutex.lock(); },
                   [] { process_slot().mutex.unlock(); },
                   give_up_groups_in_child);
}

}  // namespace

void Group::note_failure() {
  try {
    throw;
  } catch (const InvalidArgument&) {  // nothing was sent
  } catch (const Unsupported&) {
  } catch (const TimeoutError& error) {
    failed = true;
    const auto& peers = error.context().peers;
    if (liveness && !peers.empty()) liveness->announce_timeout(peers);
  } catch (...) {
    failed = true;
  }
}

std::shared_ptr<Group> default_group() noexcept {
  if (is_rank) return thread_group;
  ProcessSlot& slot = process_slot();
  const std::lock_guard lock(slot.mutex);
  return slot.group;
}

std::shared_ptr<Group> require_default_group(const char* operation) {
  auto group = default_group();
  if (!group) {
    ProcessSlot& slot = process_slot();
    const std::lock_guard lock(slot.mutex);
    if (!slot.of_parent.empty()) {
      throw InvalidArgument(
          "this process was forked from rank " +
              std::to_string(slot.of_parent.back()->rank) +
              "; a group does not survive a fork: start ranks with "
              "lockstep::spawn or `lockstep run`",
          {.operation = operation});
    }
    throw InvalidArgument("there is no group; call init_process_group first",
                          {.operation = operation});
  }
  return group;
}

std::shared_ptr<Group> exchange_default_group(std::shared_ptr<Group> group) {
  ProcessSlot& slot = process_slot();
  if (is_rank) return std::exchange(thread_group, std::move(group));
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
