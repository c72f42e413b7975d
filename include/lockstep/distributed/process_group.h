#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/export.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace lockstep {
namespace distributed {
struct Group;
}

/// Handle of a group of ranks: the default group, which `init_process_group`
/// made, or one that `new_group` made. Copies share the group. Mirrors
/// `torch.distributed.ProcessGroup`, and `GroupMember.NON_GROUP_MEMBER` in the
/// ranks that do not belong to the group.
///
/// Ranks have a number of their own in each group, from 0; their numbers in the
/// default group are the global ones, and errors name ranks by these alone.
///
/// A group lives until `destroy_process_group`, whoever holds handles; later
/// collectives with its handle throw InvalidArgument.
///
/// Thread safety: all members. Those of an empty handle throw InvalidArgument
/// without a default group.
class LOCKSTEP_API ProcessGroup {
 public:
  /// Empty: stands for the default group, whichever it is at the time of use.
  ProcessGroup() = default;
  explicit ProcessGroup(std::shared_ptr<distributed::Group> group)
      : group_(std::move(group)) {}

  /// Whether this rank belongs to the group. If not, collectives with this
  /// handle log a warning and return at once, as in PyTorch.
  [[nodiscard]] bool is_member() const;
  /// Own rank in the group; -1 where it is no member.
  [[nodiscard]] int rank() const;
  /// Number of ranks of the group; -1 where this rank is no member.
  [[nodiscard]] int size() const;
  /// Global ranks of the members, in the order of their ranks in the group.
  [[nodiscard]] std::vector<int> ranks() const;
  /// Name of the group, the same on all members: "0" for the first default
  /// group, "1" for what `new_group` made first.
  [[nodiscard]] std::string name() const;
  /// What it was called by NewGroupOptions::group_desc, else "default_pg" or
  /// "undefined".
  [[nodiscard]] std::string description() const;
  /// Name of the group's backend, as `get_backend`; empty where this rank is no
  /// member.
  [[nodiscard]] std::string backend() const;
  /// The group for use with c10d, as `get_group`.
  /// \throws InvalidArgument where this rank is no member
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> c10d() const;

  /// What the handle holds; null: empty.
  [[nodiscard]] const std::shared_ptr<distributed::Group>& held() const {
    return group_;
  }

 private:
  std::shared_ptr<distributed::Group> group_;
};

/// Arguments of `init_process_group`, all optional. Mirrors
/// `torch.distributed.init_process_group`.
struct InitOptions {
  /// "hybrid" (shared memory inside each host, Gloo between hosts), "shm",
  /// "gloo", or "mpi" (under mpirun; the module is loaded when it is asked
  /// for). Empty: `LOCKSTEP_BACKEND`, else "hybrid".
  std::string backend = {};
  /// "env://", "tcp://host:port" or "file:///path". Empty: "env://".
  std::string init_method = {};
  /// Bound of every wait of the group, and of the rendezvous.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Number of ranks; unset: from the environment or the URL.
  std::optional<int> world_size = {};
  /// Own rank; unset: from the environment or the URL.
  std::optional<int> rank = {};
  /// Send exactly what c10d sends, so that Python ranks can be members:
  /// Gloo, no checks between ranks. Unset: `LOCKSTEP_INTEROP`, else false.
  std::optional<bool> interop = {};
};

/// Joins the ranks of a job into the default group. Collective and blocking:
/// returns when all ranks are connected and their versions agree.
///
/// Without any variable or argument it makes a world of one. The group belongs
/// to the calling thread where `testing::run_ranks` made the thread a rank,
/// else to the process.
///
/// \throws InvalidArgument  wrong or missing settings (all named at once), a
///     rank outside the world, an unknown backend, a second call without
///     `destroy_process_group`
/// \throws TimeoutError  not all ranks arrived in time
/// \throws StoreError  the store cannot be reached or bound
/// \throws MismatchError  ranks run different versions of libtorch or Lockstep
///
/// Thread safety: call from one thread. Mirrors
/// `torch.distributed.init_process_group`.
LOCKSTEP_API void init_process_group(const InitOptions& options = {});

/// The same over a store that the caller made; `rank` and `world_size` must be
/// set. The group shares ownership of the store. One store serves one group;
/// for another one wrap it in a `c10d::PrefixStore`.
LOCKSTEP_API void init_process_group(c10::intrusive_ptr<c10d::Store> store,
                                     const InitOptions& options);

/// Says goodbye to the other ranks of the group and frees it; with the default
/// group all others go, too. Gradients and tensors stay valid. Returns within a
/// bound also after a failure. Does nothing when there is no such group (any
/// more), or this rank is no member.
///
/// A process that a rank forks has no group, and its end is no concern of the
/// others.
LOCKSTEP_API void destroy_process_group(const ProcessGroup& group = {});

/// Whether the calling thread's rank has a default group. Never throws.
[[nodiscard]] LOCKSTEP_API bool is_initialized() noexcept;

/// Own rank in the default group; 0 without a group.
[[nodiscard]] LOCKSTEP_API int get_rank() noexcept;

/// Own rank in `group`; -1 where it is no member. Mirrors
/// `torch.distributed.get_rank(group)`.
/// \throws InvalidArgument without a default group
[[nodiscard]] LOCKSTEP_API int get_rank(const ProcessGroup& group);

/// Size of the default group; 1 without a group.
[[nodiscard]] LOCKSTEP_API int get_world_size() noexcept;

/// Size of `group`; -1 where this rank is no member. Mirrors
/// `torch.distributed.get_world_size(group)`.
/// \throws InvalidArgument without a default group
[[nodiscard]] LOCKSTEP_API int get_world_size(const ProcessGroup& group);

/// Own index among the ranks of this host; 0 without a group.
[[nodiscard]] LOCKSTEP_API int get_local_rank() noexcept;

/// Number of ranks on this host; 1 without a group.
[[nodiscard]] LOCKSTEP_API int get_local_world_size() noexcept;

/// Name of the group's backend. Of "hybrid": "shm" where all ranks share a
/// host, "hybrid" on several hosts of equally many ranks, two at least, "gloo"
/// on others, "self" in a group of one. Else the name given.
/// \throws InvalidArgument without a default group
[[nodiscard]] LOCKSTEP_API std::string get_backend(
    const ProcessGroup& group = {});

/// The rank that `global_rank` has in `group`. Mirrors
/// `torch.distributed.get_group_rank`.
/// \throws InvalidArgument where it is no member
[[nodiscard]] LOCKSTEP_API int get_group_rank(const ProcessGroup& group,
                                              int global_rank);

/// The global rank of rank `group_rank` of `group`. Mirrors
/// `torch.distributed.get_global_rank`.
/// \throws InvalidArgument where there is no such rank
[[nodiscard]] LOCKSTEP_API int get_global_rank(const ProcessGroup& group,
                                               int group_rank);

/// Global ranks of the members, in the order of their ranks in the group.
/// Mirrors `torch.distributed.get_process_group_ranks`.
[[nodiscard]] LOCKSTEP_API std::vector<int> get_process_group_ranks(
    const ProcessGroup& group = {});

/// The default group for use with c10d; include
/// `<torch/csrc/distributed/c10d/ProcessGroup.hpp>` to use it. Shared
/// ownership; after `destroy_process_group` its collectives throw.
/// \throws InvalidArgument without a group
[[nodiscard]] LOCKSTEP_API c10::intrusive_ptr<c10d::ProcessGroup> get_group();

/// The device of this rank: the CUDA device of its local rank where libtorch
/// has CUDA and one is there (it is made the current one), else the CPU.
[[nodiscard]] LOCKSTEP_API c10::Device device();

}  // namespace lockstep
