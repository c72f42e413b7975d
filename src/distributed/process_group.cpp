#include "lockstep/distributed/process_group.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/backend_registry.h"
#include "core/clock.h"
#include "core/env.h"
#include "distributed/connect.h"
#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "distributed/lifetime.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "rendezvous/bounded_store.h"
#include "rendezvous/open_stores.h"
#include "rendezvous/rendezvous.h"
#include "rendezvous/roll_call.h"

namespace lockstep {
namespace {

using distributed::Group;
using rendezvous::Joined;

constexpr const char* kOperation = "init_process_group";

std::string chosen_backend(const InitOptions& options, bool interop) {
  std::string name = options.backend;
  if (name.empty()) name = env::get("LOCKSTEP_BACKEND").value_or("");
  if (name.empty()) name = interop ? "gloo" : "hybrid";
  comm::check_backend(name);
  if (interop && name != "gloo") {
    throw InvalidArgument(
        "an interop group needs backend \"gloo\", not \"" + name + '"',
        {.operation = kOperation});
  }
  return name;
}

bool chosen_interop(const InitOptions& options) {
  if (options.interop) return *options.interop;
  return env::get_bool("LOCKSTEP_INTEROP").value_or(false);
}

void refuse_second_init() {
  if (is_initialized()) {
    throw InvalidArgument(
        "there is a group already; call destroy_process_group first",
        {.operation = kOperation});
  }
}

/// Call in a catch block. The next group joins anew, unless this process serves
/// a store that works.
void forget_lost_store(const Joined& joined) {
  if (joined.place.empty()) return;
  try {
    throw;
  } catch (const StoreError&) {
  } catch (...) {
    if (joined.hosts_store) return;
  }
  rendezvous::forget_store(joined.place);
}

/// Meets the other ranks, who then watch each other.
void meet(Group& group,
          const c10::intrusive_ptr<c10d::Store>& store,
          const Deadline& deadline,
          bool interop) {
  if (interop) {
    rendezvous::publish_versions(*store, group.rank);
  } else {
    rendezvous::roll_call(
        *store, group.rank, group.world_size, deadline.remaining());
    group.liveness = comm::Liveness::start(
        store, group.rank, group.world_size, deadline.remaining());
  }
}

std::shared_ptr<Group> make_group(const Joined& joined,
                                  const std::string& backend,
                                  std::chrono::milliseconds timeout,
                                  const Deadline& deadline,
                                  bool interop) {
  auto group = std::make_shared<Group>();
  group->rank = group->global_rank = joined.rank;
  group->world_size = group->global_world_size = joined.world_size;
  group->ranks.resize(group->world_size);
  std::iota(group->ranks.begin(), group->ranks.end(), 0);
  group->description = "default_pg";
  group->wanted_backend = backend;
  group->timeout = timeout;
  group->hosts_store = joined.hosts_store;
  if (!distributed::thread_is_rank()) {
    log::set_rank(group->rank, group->world_size);
  }
  int generation = 0;
  if (group->world_size == 1) {
    distributed::connect(*group, nullptr, deadline, interop);
  } else {
    const auto store = c10::make_intrusive<rendezvous::BoundedStore>(
        joined.store, deadline, group->context(kOperation));
    if (!joined.place.empty()) {
      generation = rendezvous::next_generation(
          joined.place, group->rank, store, deadline);
    }
    const auto keys = rendezvous::group_store(store, generation);
    meet(*group, keys, deadline, interop);
    distributed::connect(*group, keys, deadline, interop);
    store->lift_bound();
  }
  group->store = rendezvous::group_store(joined.store, generation);
  group->c10d_name = std::to_string(generation);
  distributed::complete(*group);
  if (joined.local_rank) group->local_rank = *joined.local_rank;
  if (joined.local_world_size) {
    group->local_world_size = *joined.local_world_size;
  }
  return group;
}

/// The common part of both forms of init: `join(backend, interop, deadline)`
/// gives the store.
template <class Join>
void form_group(const InitOptions& options, Join&& join) {
  ErrorContext context = {.operation = kOperation};
  if (options.timeout.count() <= 0) {
    throw InvalidArgument("timeout must be positive", context);
  }
  const auto timeout = std::min(options.timeout, kLongestWait);
  const Deadline deadline(timeout);
  const bool interop = chosen_interop(options);
  const std::string backend = chosen_backend(options, interop);
  Joined joined;
  try {
    joined = join(backend, interop, deadline);
    context.rank = joined.rank;
    context.world_size = joined.world_size;
    auto group = make_group(joined, backend, timeout, deadline, interop);
    if (group->world_size > 1 && !distributed::thread_is_rank()) {
      distributed::end_with_process();
    }
    distributed::exchange_default_group(std::move(group));
  } catch (...) {
    forget_lost_store(joined);
    distributed::rethrow_converted(context);
  }
}

}  // namespace

void init_process_group(const InitOptions& options) {
  refuse_second_init();
  form_group(
      options,
      [&](const std::string& backend, bool interop, const Deadline& deadline) {
        return rendezvous::join(
            options, interop, deadline, comm::assigned_by(backend, deadline));
      });
}

void init_process_group(c10::intrusive_ptr<c10d::Store> store,
                        const InitOptions& options) {
  const ErrorContext context = {.operation = kOperation};
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
  form_group(options, [&](const auto&...) {
    return Joined{.store = std::move(store),
                  .rank = *options.rank,
                  .world_size = *options.world_size};
  });
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
