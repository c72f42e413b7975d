#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "core/clock.h"
#include "lockstep/core/error.h"
#include "rendezvous/assigned.h"

namespace lockstep::comm {

class Liveness;

/// What a backend of a group is made from.
struct BackendContext {
  c10::intrusive_ptr<c10d::Store> store = {};  ///< key space of this group
  int rank = 0;
  int world_size = 1;
  std::string group_name = "world";
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// When creation must have ended; operations have `timeout`.
  Deadline created_by = Deadline(timeout);
  /// Watches the peers; null in an interop group.
  std::shared_ptr<Liveness> liveness = {};
  bool interop = false;

  /// Of an error of this rank in the group.
  [[nodiscard]] ErrorContext error_context(std::string backend) const;
};

using BackendFactory =
    std::function<c10::intrusive_ptr<c10d::Backend>(const BackendContext&)>;

/// Name -> factory. Built-in backends are there from the start. Thread safe.
void register_backend(const std::string& name, BackendFactory factory);

/// Names of the backends that were built, sorted.
std::vector<std::string> available_backends();

/// Throws InvalidArgument that lists the backends built when `name` is unknown,
/// and names the build option when it was turned off.
void check_backend(const std::string& name);

/// What the backend itself, of a name that was checked, says about this
/// process; nothing where it knows nothing. May block until `deadline`.
std::optional<rendezvous::Assigned> assigned_by(const std::string& name,
                                                const Deadline& deadline);

/// Collective over the context's ranks. Throws as `check_backend` does.
c10::intrusive_ptr<c10d::Backend> create_backend(const std::string& name,
                                                 const BackendContext& context);

}  // namespace lockstep::comm
