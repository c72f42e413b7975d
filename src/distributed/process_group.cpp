#include "lockstep/distributed/process_group.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/backend_registry.h"
#include "comm/backends/self/self_backend.h"
#include "core/env.h"
#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "distributed/lifetime.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "rendezvous/rendezvous.h"
#include "rendezvous/roll_call.h"

namespace lockstep {
namespace {

using distributed::Group;
using rendezvous::Joined;

/// How long rank 0 keeps the store up for ranks that have not left.
constexpr std::chrono::milliseconds kGoodbyeBound{60'000};
/// The same after a failure: only for those that are about to see it too.
constexpr std::chrono::milliseconds kGoodbyeBoundAfterFailure{1'000};

std::string chosen_backend(const InitOptions& options, bool interop) {
  std::string name = options.backend;
  if (name.empty()) name = env::get("LOCKSTEP_BACKEND").value_or("");
  if (name.empty()) name = interop ? "gloo" : "hybrid";
  comm::check_backend(name);
  if (interop && name != "gloo") {
    throw InvalidArgument(
        "an interop group needs backend \"gloo\", not \"" + name + '"',
        {.operation = "init_process_group"});
  }
  return name;
}

bool chosen_interop(const InitOptions& options) {
  if (options.interop) return *options.interop;
  return env::get_bool("LOCKSTEP_INTEROP").value_or(false);
}

void set_local_ranks(Group& group, const Joined& joined) {
  if (group.liveness) {
    const auto& ranks = group.liveness->host_ranks();
    const auto own = std::find(ranks.begin(), ranks.end(), group.rank);
    group.local_rank = static_cast<int>(own - ranks.begin());
    group.local_world_size = static_cast<int>(ranks.size());
  } else {
    group.local_rank = group.rank;
    group.local_world_size = group.world_size;
  }
  if (joined.local_rank) group.local_rank = *joined.local_rank;
  if (joined.local_world_size) {
    group.local_world_size = *joined.local_world_size;
  }
}

void make_process_group(Group& group, const std::string& name) {
  using c10d::ProcessGroup;
  group.process_group = c10::make_intrusive<ProcessGroup>(
      group.store, group.rank, group.world_size);
  group.process_group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
  group.process_group->setBackend(
      c10::kCPU, ProcessGroup::BackendType::CUSTOM, group.backend);
  group.process_group->setGroupName(name);
  group.process_group->setGroupDesc("default_pg");
}

void refuse_second_init() {
  if (is_initialized()) {
    throw InvalidArgument(
        "there is a group already; call destroy_process_group first",
        {.operation = "init_process_group"});
  }
}

std::shared_ptr<Group> connect(const Joined& joined,
                               const std::string& backend,
                               std::chrono::milliseconds timeout,
                               bool interop) {
  auto group = std::make_shared<Group>();
  group->rank = joined.rank;
  group->world_size = joined.world_size;
  group->timeout = timeout;
  group->hosts_store = joined.hosts_store;
  // c10d's own key chain.
  const std::string name = std::to_string(joined.generation);
  group->store = c10::make_intrusive<c10d::PrefixStore>(
      name + '/',
      c10::make_intrusive<c10d::PrefixStore>("default_pg", joined.store));
  if (!distributed::thread_is_rank()) {
    log::set_rank(group->rank, group->world_size);
  }

  if (group->world_size == 1) {
    group->backend = comm::self::create();
  } else {
    if (interop) {
      rendezvous::publish_versions(*group->store, group->rank);
    } else {
      rendezvous::roll_call(
          *group->store, group->rank, group->world_size, timeout);
      group->liveness = comm::Liveness::start(
          group->store, group->rank, group->world_size, timeout);
    }
    group->backend = comm::create_backend(backend,
                                          {.store = group->store,
                                           .rank = group->rank,
                                           .world_size = group->world_size,
                                           .group_name = group->name,
                                           .timeout = timeout,
                                           .liveness = group->liveness,
                                           .interop = interop});
  }
  group->backend_name =
      backend == "hybrid" ? group->backend->getBackendName() : backend;
  set_local_ranks(*group, joined);
  make_process_group(*group, name);
  return group;
}

/// The common part of both forms of init: `join(interop)` gives the store.
template <class Join>
void form_group(const InitOptions& options, Join&& join) {
  const ErrorContext context = {.operation = "init_process_group"};
  if (options.timeout.count() <= 0) {
    throw InvalidArgument("timeout must be positive", context);
  }
  const bool interop = chosen_interop(options);
  const std::string backend = chosen_backend(options, interop);
  try {
    auto group = connect(join(interop), backend, options.timeout, interop);
    if (group->world_size > 1 && !distributed::thread_is_rank()) {
      distributed::end_with_process();
    }
    distributed::exchange_default_group(std::move(group));
  } catch (...) {
    distributed::rethrow_converted(context);
  }
}

}  // namespace

void init_process_group(const InitOptions& options) {
  refuse_second_init();
  form_group(options,
             [&](bool interop) { return rendezvous::join(options, interop); });
}

void init_process_group(c10::intrusive_ptr<c10d::Store> store,
                        const InitOptions& options) {
  const ErrorContext context = {.operation = "init_process_group"};
  refuse_second_init();
  if (!store) throw InvalidArgument("store is null", context);
  if (!options.init_method.empty()) {
    throw InvalidArgument("init_method cannot be given with a store", context);
  }
  if (!options.world_size || !options.rank) {
    throw InvalidArgument("world_size and rank must be given with a store",
                          context);
  }
  if (*options.world_size < 1 || *options.rank < 0 ||
      *options.rank >= *options.world_size) {
    throw InvalidArgument("rank " + std::to_string(*options.rank) +
                              " is outside a world of " +
                              std::to_string(*options.world_size),
                          context);
  }
  form_group(options, [&](bool) {
    return Joined{.store = std::move(store),
                  .rank = *options.rank,
                  .world_size = *options.world_size};
  });
}

void destroy_process_group() {
  const auto group = distributed::exchange_default_group(nullptr);
  if (!group) return;
  group->destroyed = true;
  group->backend->shutdown();
  if (!group->liveness) return;
  group->liveness->leave();
  if (group->hosts_store) {
    distributed::wait_for_goodbyes(
        *group->liveness,
        std::min(group->timeout,
                 group->failed ? kGoodbyeBoundAfterFailure : kGoodbyeBound));
  }
}

bool is_initialized() noexcept {
  return distributed::default_group() != nullptr;
}

int get_rank() noexcept {
  const auto group = distributed::default_group();
  return group ? group->rank : 0;
}

int get_world_size() noexcept {
  const auto group = distributed::default_group();
  return group ? group->world_size : 1;
}

int get_local_rank() noexcept {
  const auto group = distributed::default_group();
  return group ? group->local_rank : 0;
}

int get_local_world_size() noexcept {
  const auto group = distributed::default_group();
  return group ? group->local_world_size : 1;
}

std::string get_backend() {
  return distributed::require_default_group("get_backend")->backend_name;
}

c10::intrusive_ptr<c10d::ProcessGroup> get_group() {
  return distributed::require_default_group("get_group")->process_group;
}

c10::Device device() {
  if (!at::globalContext().hasCUDA()) return c10::kCPU;
  const auto* cuda = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  const int count = cuda->deviceCount();
  if (count == 0) return c10::kCPU;
  const int local_rank = get_local_rank();
  if (local_rank >= count) {
    throw InvalidArgument("local rank " + std::to_string(local_rank) +
                              " has no CUDA device of its own: this host has " +
                              std::to_string(count) +
                              "; start at most one process per device",
                          {.operation = "device"});
  }
  const c10::Device own(c10::DeviceType::CUDA,
                        static_cast<c10::DeviceIndex>(local_rank));
  cuda->setDevice(own);
  return own;
}

}  // namespace lockstep
