#include "distributed/group.h"

#include <pthread.h>

#include <algorithm>
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
    std::vector<int> missing;
    for (const int peer : error.context().peers) {
      if (const auto member = rank_of(peer)) missing.push_back(*member);
    }
    if (liveness && !missing.empty()) liveness->announce_timeout(missing);
  } catch (...) {
    failed = true;
  }
}

std::optional<int> Group::rank_of(int global) const {
  const auto found = std::find(ranks.begin(), ranks.end(), global);
  if (found == ranks.end()) return std::nullopt;
  return static_cast<int>(found - ranks.begin());
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

std::shared_ptr<Group> require_group(const ProcessGroup& handle,
                                     const char* operation) {
  auto whole = require_default_group(operation);
  const auto& group = handle.held();
  if (!group || group == whole) return whole;
  if (group->destroyed || group->within.value_or(whole).lock() != whole) {
    throw InvalidArgument("the group was destroyed; make a new one",
                          group->context(operation));
  }
  return group;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
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
