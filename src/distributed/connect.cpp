#include "distributed/connect.h"

#include <algorithm>

#include "comm/backend_registry.h"
#include "comm/backends/self/self_backend.h"
#include "comm/blame.h"

namespace lockstep::distributed {

void connect(Group& group,
             const c10::intrusive_ptr<c10d::Store>& store,
             const Deadline& deadline,
             bool interop) {
  if (group.world_size == 1) {
    auto context = group.context("");
    context.backend = "self";
    group.backend = comm::self::create(std::move(context), group.timeout);
    return;
  }
  try {
    group.backend = comm::create_backend(group.wanted_backend,
                                         {.store = store,
                                          .rank = group.rank,
                                          .world_size = group.world_size,
                                          .group_name = group.name,
                                          .timeout = group.timeout,
                                          .created_by = deadline,
                                          .liveness = group.liveness,
                                          .interop = interop});
  } catch (const std::exception& error) {
    if (group.liveness) {
      comm::announce_current_exception(*group.liveness, error.what());
    }
    throw;
  }
}

void complete(Group& group) {
  group.backend_name = group.wanted_backend == "hybrid"
                           ? group.backend->getBackendName()
                           : group.wanted_backend;
  group.local_rank = group.rank;
  group.local_world_size = group.world_size;
  if (group.liveness) {
    const auto& ranks = group.liveness->host_ranks();
    const auto own = std::find(ranks.begin(), ranks.end(), group.rank);
    group.local_rank = static_cast<int>(own - ranks.begin());
    group.local_world_size = static_cast<int>(ranks.size());
  }
  using Type = c10d::ProcessGroup::BackendType;
  group.process_group = c10::make_intrusive<c10d::ProcessGroup>(
      group.store, group.rank, group.world_size);
  group.process_group->setDefaultBackend(Type::CUSTOM);
  group.process_group->setBackend(c10::kCPU, Type::CUSTOM, group.backend);
  group.process_group->setGroupName(group.c10d_name);
  group.process_group->setGroupDesc(group.description);
}

}  // namespace lockstep::distributed
