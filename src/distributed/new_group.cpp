#include "lockstep/distributed/new_group.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "comm/backend_registry.h"
#include "core/clock.h"
#include "distributed/agreement.h"
#include "distributed/connect.h"
#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "distributed/lifetime.h"
#include "lockstep/core/error.h"
#include "rendezvous/bounded_store.h"

namespace lockstep {
namespace {

using distributed::Group;
using distributed::list_of;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Lists = std::vector<std::vector<int>>;

/// Groups that are made together: each rank belongs to one of them at most.
struct Plan {
  const char* operation;
  std::shared_ptr<Group> whole;
  std::vector<int> ranks;  ///< global ranks that take part in making them
  Lists lists;             ///< global ranks of each group
  std::vector<std::string> names;  ///< of each group
  std::string backend;
  std::chrono::milliseconds timeout;
  std::string description;
  /// What all that take part must want alike.
  std::string wanted;
  /// Throws InvalidArgument where that is wrong.
  std::function<void(const ErrorContext&)> check;
};

std::string text_of(const Lists& lists) {
  std::string text;
  for (const auto& list : lists) {
    text += (text.empty() ? "[" : ", [") + list_of(list) + ']';
  }
  return text;
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

/// Ranks are below `limit`; no list is empty, no rank in two places.
void check_lists(const Lists& lists, int limit, const ErrorContext& context) {
  std::set<int> seen;
  for (const auto& list : lists) {
    if (list.empty()) {
      throw InvalidArgument("a list of ranks is empty; give at least one rank",
                            context);
    }
    for (const int rank : list) {
      if (rank < 0 || rank >= limit) {
        throw InvalidArgument(
            "rank " + std::to_string(rank) + " in " + text_of(lists) +
                " is out of range; ranks are 0 to " + std::to_string(limit - 1),
            context);
      }
      if (!seen.insert(rank).second) {
        throw InvalidArgument("rank " + std::to_string(rank) +
                                  " is there twice in " + text_of(lists),
                              context);
      }
    }
  }
}

/// The global ranks of ranks of `parent`, in ascending order of the latter.
/// Those that it does not have stay as they are.
Lists global_ranks(const Group& parent, Lists lists) {
  for (auto& list : lists) {
    std::sort(list.begin(), list.end());
    for (int& rank : list) {
      if (rank < 0 || rank >= parent.world_size) continue;
      rank = parent.ranks[static_cast<size_t>(rank)];
    }
  }
  return lists;
}

/// As c10d names them: "1", "2", ...
std::vector<std::string> next_numbers(Group& whole, size_t count) {
  const std::lock_guard lock(whole.sub_groups.mutex);
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) {
    names.push_back(std::to_string(++whole.sub_groups.numbered));
  }
  return names;
}

/// As c10d names a group that its members make on their own. Python numbers
/// these by the groups that a rank is in; where no Python rank takes part, the
/// number is one that all members must agree on.
std::string next_hash(Group& whole, const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += std::to_string(rank) + '_';
  const std::lock_guard lock(whole.sub_groups.mutex);
  const auto number = whole.liveness
                          ? static_cast<size_t>(whole.sub_groups.named[text]++)
                          : 1 + whole.sub_groups.alive.size();
  return c10::sha1(text + std::to_string(number)).str();
}

StorePtr key_space(const std::string& name, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(name + '/', store);
}

/// The group as this rank sees it; still without connections.
std::shared_ptr<Group> describe(const Plan& plan, size_t i) {
  const Group& whole = *plan.whole;
  auto group = std::make_shared<Group>();
  group->c10d_name = plan.names[i];
  group->description =
      plan.description.empty() ? "undefined" : plan.description;
  group->name = plan.description.empty() ? plan.names[i] : plan.description;
  group->wanted_backend = plan.backend;
  group->ranks = plan.lists[i];
  group->rank = group->rank_of(whole.global_rank).value_or(-1);
  group->world_size = static_cast<int>(group->ranks.size());
  group->global_rank = whole.global_rank;
  group->global_world_size = whole.global_world_size;
  group->timeout = plan.timeout;
  group->store = key_space(plan.names[i], whole.store);
  group->within = plan.whole;
  return group;
}

void connect(Group& group,
             Group& whole,
             const StorePtr& store,
             const Deadline& deadline) {
  const auto keys = key_space(group.c10d_name, store);
  if (whole.liveness && group.world_size > 1) {
    group.liveness = comm::Liveness::start_part(
        *whole.liveness, group.ranks, keys, deadline.remaining());
  }
  distributed::connect(group, keys, deadline, !whole.liveness);
  distributed::complete(group);
  if (group.world_size > 1 && !distributed::thread_is_rank()) {
    distributed::end_with_process();
  }
}

std::vector<ProcessGroup> make(const Plan& plan) {
  Group& whole = *plan.whole;
  const Deadline deadline(std::max(whole.timeout, plan.timeout));
  const auto context = whole.context(plan.operation);
  try {
    const auto store = c10::make_intrusive<rendezvous::BoundedStore>(
        whole.store, deadline, context);
    const distributed::Agreement agreement(
        whole, plan.ranks, key_space(plan.names[0], store), plan.wanted);
    plan.check(context);
    agreement.reach(deadline, context);
    std::vector<ProcessGroup> handles;
    for (size_t i = 0; i < plan.lists.size(); ++i) {
      auto group = describe(plan, i);
      handles.emplace_back(group);
      if (!group->is_member()) continue;
      connect(*group, whole, store, deadline);
      const std::lock_guard lock(whole.sub_groups.mutex);
      whole.sub_groups.alive.push_back(std::move(group));
    }
    store->lift_bound();
    return handles;
  } catch (...) {
    distributed::rethrow_converted(context);
  }
}

/// The plan for new groups of all ranks' making.
std::vector<ProcessGroup> make_new(const char* operation,
                                   const Lists& lists,
                                   const NewGroupOptions& options) {
  auto whole = distributed::require_default_group(operation);
  Plan plan = {.operation = operation,
               .whole = whole,
               .ranks = whole->ranks,
               .lists = lists,
               .names = {},
               .backend = options.backend.empty() ? whole->wanted_backend
                                                  : options.backend,
               .timeout = std::min(options.timeout.value_or(whole->timeout),
                                   kLongestWait),
               .description = options.group_desc,
               .wanted = {},
               .check = {}};
  if (options.sort_ranks) {
    for (auto& list : plan.lists) std::sort(list.begin(), list.end());
  }
  if (options.use_local_synchronization) {
    plan.ranks = plan.lists[0];
    plan.names = {next_hash(*whole, plan.lists[0])};
  } else {
    plan.names = next_numbers(*whole, std::max<size_t>(lists.size(), 1));
  }
  plan.wanted =
      "groups of ranks " + text_of(plan.lists) + " over " + plan.backend;
  plan.check = [&](const ErrorContext& context) {
    if (lists.empty()) {
      throw InvalidArgument("there is no list of ranks", context);
    }
    check_lists(lists, whole->world_size, context);
    if (plan.timeout.count() <= 0) {
      throw InvalidArgument("timeout must be positive", context);
    }
    comm::check_backend(plan.backend);
    if (!whole->liveness && whole->world_size > 1 && plan.backend != "gloo") {
      throw InvalidArgument("an interop group needs backend \"gloo\", not \"" +
                                plan.backend + '"',
                            context);
    }
  };
  return make(plan);
}

/// A group that this rank is no member of and has no part in.
ProcessGroup group_of_others(std::shared_ptr<Group> whole,
                             const std::vector<int>& ranks,
                             const std::string& description) {
  const Plan plan = {.operation = "",
                     .whole = std::move(whole),
                     .ranks = {},
                     .lists = {ranks},
                     .names = {""},
                     .backend = {},
                     .timeout = {},
                     .description = description,
                     .wanted = {},
                     .check = {}};
  return ProcessGroup(describe(plan, 0));
}

Subgroups with_current(std::vector<ProcessGroup> handles) {
  Subgroups result{.current = handles.front(), .all = std::move(handles)};
  for (const auto& handle : result.all) {
    if (handle.is_member()) result.current = handle;
  }
  return result;
}

}  // namespace

ProcessGroup new_group(const std::vector<int>& ranks,
                       const NewGroupOptions& options) {
  const auto whole = distributed::require_default_group("new_group");
  if (options.use_local_synchronization &&
      !contains(ranks, whole->global_rank)) {
    return group_of_others(whole, ranks, options.group_desc);
  }
  return make_new("new_group", {ranks}, options)[0];
}

ProcessGroup new_group(std::nullopt_t /*all_ranks*/,
                       const NewGroupOptions& options) {
  return new_group(distributed::require_default_group("new_group")->ranks,
                   options);
}

Subgroups new_subgroups(std::optional<int> group_size,
                        const NewSubgroupsOptions& options) {
  constexpr const char* kOperation = "new_subgroups";
  const auto group = distributed::require_group(options.group, kOperation);
  const int size = group_size.value_or(get_local_world_size());
  if (size < 1 || group->world_size % size != 0) {
    throw InvalidArgument("group_size is " + std::to_string(size) +
                              "; it must divide the number of ranks, " +
                              std::to_string(group->world_size),
                          group->context(kOperation));
  }
  Lists lists;
  for (size_t i = 0; i < group->ranks.size(); ++i) {
    if (i % static_cast<size_t>(size) == 0) lists.emplace_back();
    lists.back().push_back(group->ranks[i]);
  }
  return with_current(make_new(kOperation,
                               lists,
                               {.backend = options.backend,
                                .timeout = options.timeout,
                                .group_desc = options.group_desc}));
}

Subgroups new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewGroupOptions& options) {
  constexpr const char* kOperation = "new_subgroups_by_enumeration";
  if (options.use_local_synchronization) {
    throw InvalidArgument(
        "use_local_synchronization is for new_group: here all ranks take part",
        distributed::require_default_group(kOperation)->context(kOperation));
  }
  return with_current(make_new(kOperation, ranks_per_subgroup_list, options));
}

ProcessGroup split_group(const ProcessGroup& parent,
                         const std::vector<std::vector<int>>& split_ranks,
                         const SplitGroupOptions& options) {
  constexpr const char* kOperation = "split_group";
  const auto group = distributed::require_group(parent, kOperation);
  if (!group->is_member()) {
    throw InvalidArgument("this rank does not belong to the parent group",
                          group->context(kOperation));
  }
  const auto prefix = ":split:" + std::to_string(group->splits.fetch_add(1));
  Plan plan = {
      .operation = kOperation,
      .whole = distributed::require_default_group(kOperation),
      .ranks = group->ranks,
      .lists = global_ranks(*group, split_ranks),
      .names = {},
      .backend = group->wanted_backend,
      .timeout =
          std::min(options.timeout.value_or(group->timeout), kLongestWait),
      .description = options.group_desc.empty() ? group->description + prefix
                                                : options.group_desc,
      .wanted = "a split into " + text_of(split_ranks),
      .check = {}};
  for (size_t i = 0; i < std::max<size_t>(split_ranks.size(), 1); ++i) {
    plan.names.push_back(group->c10d_name + prefix + ':' + std::to_string(i));
  }
  plan.check = [&](const ErrorContext& context) {
    if (split_ranks.empty()) {
      throw InvalidArgument("split_ranks is empty", context);
    }
    check_lists(split_ranks, group->world_size, context);
    if (plan.timeout.count() <= 0) {
      throw InvalidArgument("timeout must be positive", context);
    }
  };
  return with_current(make(plan)).current;
}

}  // namespace lockstep
