#include "comm/backend_registry.h"

#include <map>
#include <mutex>

#include "comm/backends/gloo/connect.h"
#include "comm/backends/hybrid/hybrid_backend.h"
#include "comm/backends/mpi/mpi_backend.h"
#include "comm/backends/shm/shm_backend.h"
#include "comm/liveness.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendFactory> factories = {
      {"hybrid", hybrid::create},
      {"shm", shm::create},
#ifdef LOCKSTEP_WITH_GLOO
      {"gloo", gloo::create},
#endif
#ifdef LOCKSTEP_WITH_MPI
      {"mpi", mpi::create},
#endif
  };
};

Registry& registry() {
  static auto* const instance = new Registry;  // outlives static destructors
  return *instance;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

/// Backends that this build lacks, and what to configure with to have them.
const std::map<std::string, std::string>& not_built() {
  static const std::map<std::string, std::string> backends = {
#ifndef LOCKSTEP_WITH_GLOO
      {"gloo", "-DLOCKSTEP_WITH_GLOO=ON and a libtorch that contains Gloo"},
#endif
#ifndef LOCKSTEP_WITH_MPI
      {"mpi", "-DLOCKSTEP_WITH_MPI=ON where MPI is installed"},
#endif
  };
  return backends;
}

}  // namespace

ErrorContext BackendContext::error_context(std::string backend) const {
  ErrorContext result =
      liveness ? liveness->error_context()
               : ErrorContext{.rank = rank, .world_size = world_size};
  result.group = group_name;
  result.backend = std::move(backend);
  return result;
}

void register_backend(const std::string& name, BackendFactory factory) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.factories[name] = std::move(factory);
}

std::vector<std::string> available_backends() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : r.factories) names.push_back(name);
  return names;
}

void check_backend(const std::string& name) {
  const auto names = available_backends();
  if (std::find(names.begin(), names.end(), name) != names.end()) return;
  const auto absent = not_built().find(name);
  throw InvalidArgument(
      "backend \"" + name + "\" " +
      (absent == not_built().end()
           ? "is unknown"
           : "was not built: configure with " + absent->second) +
      "; built are " + listed(names));
}

std::optional<rendezvous::Assigned> assigned_by(
    [[maybe_unused]] const std::string& name,
    [[maybe_unused]] const Deadline& deadline) {
#ifdef LOCKSTEP_WITH_MPI
  if (name == "mpi") return mpi::assigned(deadline);
#endif
  return std::nullopt;
}

c10::intrusive_ptr<c10d::Backend> create_backend(
    const std::string& name, const BackendContext& context) {
  check_backend(name);
  Registry& r = registry();
  BackendFactory factory;
  {
    const std::lock_guard lock(r.mutex);
    factory = r.factories.at(name);
  }
  return factory(context);
}

}  // namespace lockstep::comm
