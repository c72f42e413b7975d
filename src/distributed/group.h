#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/liveness.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep::distributed {

struct Group;

/// What was made within a default group.
struct SubGroups {
  std::mutex mutex;  ///< all below
  /// Those that this rank belongs to, in the order in which they were made.
  std::vector<std::shared_ptr<Group>> alive;
  int numbered = 0;  ///< those whose names are numbers
  /// How many were made under each name before it was made unique.
  std::map<std::string, int> named;
};

/// A group and everything that belongs to it.
struct Group {
  std::string name = "world";  ///< in errors
  std::string c10d_name;       ///< "0", "1", ...
  std::string description;     ///< "default_pg", or what the user gave
  std::string backend_name;    ///< the backend that it has
  std::string wanted_backend;  ///< the one that was asked for
  int rank = 0;                ///< -1: this rank is no member
  int world_size = 1;
  int global_rank = 0;  ///< own rank in the default group
  int global_world_size = 1;
  std::vector<int> ranks = {0};  ///< the members' global ranks, by rank
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
  /// The default group that it was made within; unset: it is one itself.
  std::optional<std::weak_ptr<Group>> within = {};
  SubGroups sub_groups;         ///< of a default group
  std::atomic<int> splits = 0;  ///< how often split_group took it
  std::atomic<int> monitored_barriers = 0;

  [[nodiscard]] bool is_default() const { return !within; }
  [[nodiscard]] bool is_member() const { return rank >= 0; }
  /// The rank here of a global rank; nothing where that is no member.
  [[nodiscard]] std::optional<int> rank_of(int global) const;

  /// Call in a catch block: an operation ended with that exception. Tells the
  /// peers for whom it waited in vain.
  void note_failure();

  [[nodiscard]] ErrorContext context(const char* operation) const {
    return {.operation = operation,
            .group = name,
            .backend = backend_name,
            .rank = global_rank,
            .world_size = global_world_size};
  }
};

/// The calling thread's group where the thread is a rank, else the process's;
/// null without one. Thread safe.
std::shared_ptr<Group> default_group() noexcept;

/// The same; throws InvalidArgument that says what to call when there is none.
std::shared_ptr<Group> require_default_group(const char* operation);

/// The group that the handle stands for. Throws InvalidArgument where there is
/// no default group, or the handle's group was destroyed.
std::shared_ptr<Group> require_group(const ProcessGroup& handle,
                                     const char* operation);

/// "0, 2, 5".
std::string list_of(const std::vector<int>& ranks);

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
