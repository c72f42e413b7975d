#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/liveness.h"
#include "lockstep/core/error.h"

namespace lockstep::distributed {

/// A default group and everything that belongs to it.
struct Group {
  std::string name = "world";
  std::string backend_name;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::chrono::milliseconds timeout{};
  /// Whether this process serves the store of the others.
  bool hosts_store = false;
  c10::intrusive_ptr<c10d::Store> store;  ///< key space of this group
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::shared_ptr<comm::Liveness> liveness;  ///< null: interop or world of one
  /// Set once an operation failed: not all peers may be there to say goodbye.
  std::atomic<bool> failed = false;
  /// Set by destroy_process_group: wrappers may hold the group longer.
  std::atomic<bool> destroyed = false;

  /// Call in a catch block: an operation ended with that exception. Tells the
  /// peers for whom it waited in vain.
  void note_failure();

  [[nodiscard]] ErrorContext context(const char* operation) const {
    return {.operation = operation,
            .group = name,
            .backend = backend_name,
            .rank = rank,
            .world_size = world_size};
  }
};

/// The calling thread's group where the thread is a rank, else the process's;
/// null without one. Thread safe.
std::shared_ptr<Group> default_group() noexcept;

/// The same; throws InvalidArgument that says what to call when there is none.
std::shared_ptr<Group> require_default_group(const char* operation);

/// Replaces the default group (null: none) and returns the former one.
std::shared_ptr<Group> exchange_default_group(std::shared_ptr<Group> group);

/// Whether the calling thread is a rank of its own.
bool thread_is_rank() noexcept;

/// Makes the calling thread a rank of its own for its lifetime.
class ThreadRank {
 public:
  ThreadRank();
  ~ThreadRank();
  ThreadRank(const ThreadRank&) = delete;
  ThreadRank& operator=(const ThreadRank&) = delete;
};

}  // namespace lockstep::distributed
