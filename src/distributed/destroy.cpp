#include <algorithm>
#include <mutex>
#include <vector>

#include "distributed/group.h"
#include "distributed/lifetime.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep {
namespace {

using distributed::Group;

/// How long rank 0 keeps the store up for ranks that have not left.
constexpr std::chrono::milliseconds kGoodbyeBound{60'000};
/// The same after a failure: only for those that are about to see it too.
constexpr std::chrono::milliseconds kGoodbyeBoundAfterFailure{1'000};

void close(Group& group) {
  group.destroyed = true;
  group.backend->shutdown();
  if (group.liveness) group.liveness->leave();
}

void destroy_sub_group(const std::shared_ptr<Group>& group) {
  if (group->destroyed || !group->is_member()) return;
  if (const auto whole = group->within->lock()) {
    const std::lock_guard lock(whole->sub_groups.mutex);
    std::erase(whole->sub_groups.alive, group);
  }
  close(*group);
}

std::vector<std::shared_ptr<Group>> take_sub_groups(Group& whole) {
  const std::lock_guard lock(whole.sub_groups.mutex);
  return std::exchange(whole.sub_groups.alive, {});
}

void destroy_default_group() {
  const auto whole = distributed::exchange_default_group(nullptr);
  if (!whole) return;
  const auto groups = take_sub_groups(*whole);
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    close(**group);
  }
  close(*whole);
  if (whole->liveness && whole->hosts_store) {
    distributed::wait_for_goodbyes(
        *whole->liveness,
        std::min(whole->timeout,
                 whole->failed ? kGoodbyeBoundAfterFailure : kGoodbyeBound));
  }
}

}  // namespace

void destroy_process_group(const ProcessGroup& handle) {
  const auto& group = handle.held();
  if (!group || group == distributed::default_group()) {
    destroy_default_group();
  } else if (!group->is_default()) {
    destroy_sub_group(group);
  }
}

}  // namespace lockstep
