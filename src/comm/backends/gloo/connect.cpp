#include "comm/backends/gloo/connect.h"

#include "comm/backends/carried/carried_backend.h"
#include "comm/backends/carried/watched_store.h"
#include "comm/backends/gloo/network.h"
#include "comm/backends/gloo/process_group_gloo.h"
#include "comm/liveness.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::gloo {
namespace {

// Part of c10d's own key chain: a Python rank looks under the device's name.
constexpr const char* kPrefix = "cpu/";

c10::intrusive_ptr<c10d::Backend> connect(
    const c10::intrusive_ptr<c10d::Store>& store,
    const BackendContext& context,
    std::optional<bool> one_host) {
  const auto endpoint = choose_endpoint(context.store, one_host);
  return make_process_group_gloo(store,
                                 context.rank,
                                 context.world_size,
                                 context.timeout,
                                 endpoint.interfaces,
                                 endpoint.address);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_carrier(const BackendContext& context) {
  const ErrorContext error = context.error_context("gloo");
  const auto& liveness = context.liveness;
  const auto store = c10::make_intrusive<carried::WatchedStore>(
      kPrefix, context.store, liveness, context.created_by.remaining(), error);
  try {
    return connect(store, context, liveness->single_host());
  } catch (const InvalidArgument&) {
    throw;
  } catch (const std::exception&) {
    // The store or a connection may have been lost through a death.
    carried::throw_verdict(*liveness, {}, error, carried::kVerdictTime);
    throw;
  }
}

c10::intrusive_ptr<c10d::Backend> create(const BackendContext& context) {
  auto gloo = context.liveness ? make_carrier(context)
                               : connect(c10::make_intrusive<c10d::PrefixStore>(
                                             kPrefix, context.store),
                                         context,
                                         std::nullopt);
  if (context.interop) return gloo;
  return carried::make_carried_backend("gloo", context, std::move(gloo));
}

}  // namespace lockstep::comm::gloo
