#include "comm/backends/hybrid/hybrid_backend.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/backends/shm/shm_backend.h"
#include "comm/liveness.h"
#include "comm/liveness/host_part.h"
#include "lockstep/core/error.h"

#if defined(LOCKSTEP_WITH_GLOO) || defined(LOCKSTEP_WITH_MPI)
#include "comm/backends/carried/carried_backend.h"
#include "comm/backends/carried/hierarchy.h"
#include "comm/backends/carried/watched_store.h"
#endif
#ifdef LOCKSTEP_WITH_GLOO
#include "comm/backends/gloo/connect.h"
#endif
#ifdef LOCKSTEP_WITH_MPI
#include "comm/backends/mpi/mpi_backend.h"
#endif

namespace lockstep::comm::hybrid {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

#if defined(LOCKSTEP_WITH_GLOO) || defined(LOCKSTEP_WITH_MPI)

#ifdef LOCKSTEP_WITH_GLOO
namespace between = gloo;
constexpr bool kExactSizes = false;
#else
namespace between = mpi;
constexpr bool kExactSizes = mpi::kExactSizes;
#endif

/// The ranks of each host, ascending; hosts in the order of their first ranks.
std::vector<std::vector<int>> ranks_by_host(const BackendContext& context) {
  carried::WatchedStore store("hosts",
                              context.store,
                              context.liveness,
                              context.created_by.remaining(),
                              context.error_context("hybrid"));
  std::vector<std::string> keys;
  for (int rank = 0; rank < context.world_size; ++rank) {
    keys.push_back(std::to_string(rank));
  }
  store.set(keys[static_cast<size_t>(context.rank)],
            std::to_string(context.liveness->host_ranks().front()));
  std::map<int, std::vector<int>> by_first;
  int rank = 0;
  for (const auto& first : store.multiGet(keys)) {
    by_first[std::stoi(std::string(first.begin(), first.end()))].push_back(
        rank++);
  }
  std::vector<std::vector<int>> hosts;
  for (auto& [first, ranks] : by_first) hosts.push_back(std::move(ranks));
  return hosts;
}

bool has_lanes(const std::vector<std::vector<int>>& hosts) {
  const size_t lanes = hosts.front().size();
  return lanes > 1 &&
         std::all_of(hosts.begin(), hosts.end(), [&](const auto& ranks) {
           return ranks.size() == lanes;
         });
}

BackendPtr make_inside(const BackendContext& context) {
  BackendContext inside = context;
  inside.liveness = std::make_shared<liveness::HostPart>(context.liveness);
  inside.rank = inside.liveness->rank();
  inside.world_size = inside.liveness->world_size();
  return shm::create(inside);
}

BackendPtr create_between_hosts(const BackendContext& context) {
  auto hosts = std::make_shared<carried::Hosts>();
  hosts->ranks = ranks_by_host(context);
  if (!has_lanes(hosts->ranks)) return between::create(context);
  hosts->inside = make_inside(context);
  return carried::make_carried_backend("hybrid",
                                       context,
                                       between::make_carrier(context),
                                       kExactSizes,
                                       std::move(hosts));
}

#endif

}  // namespace

BackendPtr create(const BackendContext& context) {
  if (context.liveness && context.liveness->single_host()) {
    return shm::create(context);
  }
#if defined(LOCKSTEP_WITH_GLOO) || defined(LOCKSTEP_WITH_MPI)
  if (context.liveness) return create_between_hosts(context);
#endif
  // An interop group; or nothing reaches another host, which this then says.
  return create_backend("gloo", context);
}

}  // namespace lockstep::comm::hybrid
