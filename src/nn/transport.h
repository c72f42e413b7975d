#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/nn/reducer.h"

namespace lockstep::distributed {
struct Group;
}

namespace lockstep::nn {

/// Averages the gradients of one model over the ranks, one round per backward
/// pass. All ranks go through the same rounds. Calls come from one thread.
class Transport {
 public:
  explicit Transport(std::shared_ptr<distributed::Group> group)
      : group_(std::move(group)) {}
  virtual ~Transport() = default;

  /// Whether rounds can still be averaged: until the group fails or is
  /// destroyed.
  [[nodiscard]] bool usable() const noexcept;

  /// A backward pass produced its first gradient.
  virtual void begin() = 0;
  /// The gradient of parameter `index` is in place: defined, dense, of the
  /// parameter's dtype. Does what can be done without waiting.
  virtual void ready(size_t index) = 0;
  /// All gradients are ready: returns when all are averaged.
  virtual void finish() = 0;
  /// This rank's pass ended without gradients of the parameters `missing`: lets
  /// peers know and throws InvalidArgument that names them.
  [[noreturn]] virtual void fail_unready(
      const std::vector<size_t>& missing) = 0;
  /// The round ends here without `finish`, or with an exception from it.
  virtual void abandon() noexcept = 0;

  /// Lets large tensors that the calling thread allocates from now on be born
  /// where peers can reduce them, until `stop_arena`.
  virtual void start_arena() noexcept {}
  virtual void stop_arena() noexcept {}

 protected:
  /// Throws InvalidArgument that says what to do when not `usable`.
  void check_usable() const;
  /// Call in a catch block.
  void fail_for_good();

  const std::shared_ptr<distributed::Group> group_;
  bool failed_ = false;
};

/// Over shared memory where all ranks share a host, else over the group's
/// backend. `parameters` are the trainable ones. Collective.
std::unique_ptr<Transport> make_transport(
    std::shared_ptr<distributed::Group> group,
    const std::vector<NamedTensor>& parameters,
    const DistributedDataParallelOptions& options);

}  // namespace lockstep::nn
