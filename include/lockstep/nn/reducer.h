#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep {

/// Arguments of `DistributedDataParallel`, all optional.
struct DistributedDataParallelOptions {
  /// Where gradients travel through a process group's backend they are gathered
  /// in buckets, each of which leaves when it holds so many MiB or more; the
  /// first at 1 MiB already. Between ranks of one host gradients are reduced in
  /// shared memory and it has no effect.
  double bucket_cap_mb = 25;
  /// Copy rank 0's buffers to all ranks before each training forward.
  bool broadcast_buffers = true;
  /// Let large gradients be born in shared memory (docs/performance.md).
  bool arena = true;
  /// Start the memory policy (lockstep/memory/memory.h).
  bool memory_policy = true;
  /// The ranks that train together, this one among them; empty: the default
  /// group.
  ProcessGroup process_group = {};
};

namespace nn {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// What `DistributedDataParallel` does that does not depend on the module's
/// type: averages the gradients of all ranks while backward runs. Use the
/// template.
class LOCKSTEP_API Reducer {
 public:
  /// Collective over the options' group; null in a group of one. See the
  /// constructor of `DistributedDataParallel`.
  static std::shared_ptr<Reducer> create(
      std::vector<NamedTensor> parameters,
      std::vector<NamedTensor> buffers,
      const DistributedDataParallelOptions& options);

  virtual ~Reducer() = default;

  /// Call before each forward. `training`: the module's mode.
  virtual void before_forward(bool training) = 0;
  /// Call with each tensor that forward returned.
  virtual void watch(const at::Tensor& output) = 0;

  /// Nests: gradients stay local as long as a scope is open at the forward.
  virtual void enter_no_sync() noexcept = 0;
  virtual void leave_no_sync() noexcept = 0;
};

}  // namespace nn
}  // namespace lockstep
