#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep {

/// Arguments of `new_group`, all optional. Mirrors
/// `torch.distributed.new_group`.
struct NewGroupOptions {
  /// As InitOptions::backend; empty: what the default group was made with.
  /// "hybrid" looks at the members of the new group alone.
  std::string backend = {};
  /// Bound of every operation of the group; unset: the default group's.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// What the group is called in errors; empty: its name.
  std::string group_desc = {};
  /// Only the members call `new_group` and wait for each other. All must make
  /// the groups that they share in the same order.
  bool use_local_synchronization = false;
  /// Ranks in the group follow the global ranks; false: the order of the list.
  bool sort_ranks = true;
};

/// Makes a group of the global ranks `ranks`. Collective over the default
/// group: all its ranks call it, with the same arguments and in the same order,
/// and get a handle; where they are no members, one that says so. Blocking,
/// while ranks are awaited no longer than the longer one of the default group's
/// timeout and the given one.
///
/// The new group has connections of its own: its operations may overlap with
/// those of other groups, and what happens outside it does not disturb it.
/// Mirrors `torch.distributed.new_group`.
///
/// \throws InvalidArgument  no default group, a rank twice or outside the
///     world, no rank at all, an unknown backend
/// \throws MismatchError  ranks gave other arguments; names both sides, on all
/// \throws TimeoutError  names the ranks that did not call it in time
/// \throws PeerLost, StoreError, Unsupported, BackendError
///
/// Thread safety: call from one thread.
[[nodiscard]] LOCKSTEP_API ProcessGroup
new_group(const std::vector<int>& ranks, const NewGroupOptions& options = {});
/// The same of all ranks.
[[nodiscard]] LOCKSTEP_API ProcessGroup
new_group(std::nullopt_t all_ranks = std::nullopt,
          const NewGroupOptions& options = {});

/// What `new_subgroups` makes.
struct Subgroups {
  ProcessGroup current;           ///< the one that this rank belongs to
  std::vector<ProcessGroup> all;  ///< in the order of the lists
};

/// Arguments of `new_subgroups`, all optional.
struct NewSubgroupsOptions {
  /// The group whose ranks are divided; empty: the default group.
  ProcessGroup group = {};
  std::string backend = {};                               ///< NewGroupOptions
  std::optional<std::chrono::milliseconds> timeout = {};  ///< NewGroupOptions
  std::string group_desc = {};                            ///< NewGroupOptions
};

/// Divides a group's ranks into groups of `group_size` neighbours; unset: the
/// number of ranks of a host, equal on all hosts. Collective over the default
/// group, as `new_group`. Mirrors `torch.distributed.new_subgroups`, whose
/// default is the number of CUDA devices of a host.
/// \throws InvalidArgument  the size does not divide the group's
[[nodiscard]] LOCKSTEP_API Subgroups
new_subgroups(std::optional<int> group_size = {},
              const NewSubgroupsOptions& options = {});

/// Makes a group of each list of global ranks; a rank is in one list at most.
/// Where this rank is in none, `current` says that it is no member. Collective
/// over the default group, as `new_group`. Mirrors
/// `torch.distributed.new_subgroups_by_enumeration`.
/// \throws InvalidArgument  also where lists overlap, and without lists
[[nodiscard]] LOCKSTEP_API Subgroups new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewGroupOptions& options = {});

/// Arguments of `split_group`, all optional.
struct SplitGroupOptions {
  std::optional<std::chrono::milliseconds> timeout = {};  ///< unset: parent's
  std::string group_desc = {};  ///< empty: "PARENT:split:NUMBER"
};

/// Divides `parent` into groups of the given ranks of `parent`, which must not
/// overlap, and returns the own one; a handle that says so where this rank is
/// in none. The groups have the parent's kind of backend. Collective over the
/// ranks of `parent`. Mirrors `torch.distributed.split_group`, here on every
/// backend.
/// \throws InvalidArgument  also where this rank does not belong to `parent`
[[nodiscard]] LOCKSTEP_API ProcessGroup
split_group(const ProcessGroup& parent,
            const std::vector<std::vector<int>>& split_ranks,
            const SplitGroupOptions& options = {});

}  // namespace lockstep
