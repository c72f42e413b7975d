#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/core/export.h"

namespace lockstep {

/// How a reduction combines the ranks' values. AVG of integers truncates
/// toward zero and overflows for 64 bits only. Mirrors
/// `torch.distributed.ReduceOp`.
enum class ReduceOp { SUM, AVG, PRODUCT, MIN, MAX };

/// Handle of an asynchronous collective. Copies share one operation. Dropping
/// the handle neither cancels nor waits; the tensors are kept alive.
///
/// Thread safety: all members may be called from any thread.
class LOCKSTEP_API Work {
 public:
  struct Impl;
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  /// Blocks until the operation ended; it ends by itself at the group's
  /// timeout. With `timeout` this wait ends then at the latest, with zero or
  /// less at once: the operation goes on, and its tensors must still not be
  /// touched.
  /// \throws the operation's error; TimeoutError when `timeout` was too short
  void wait(std::optional<std::chrono::milliseconds> timeout = {}) const;
  /// Whether the operation ended, well or not. Never blocks.
  [[nodiscard]] bool is_completed() const;

 private:
  std::shared_ptr<Impl> impl_;
};

struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  bool async_op = false;
};
struct BroadcastOptions {
  int src = 0;
  bool async_op = false;
};
struct AllGatherOptions {
  bool async_op = false;
};
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::SUM;
  bool async_op = false;
};
struct BarrierOptions {
  bool async_op = false;
};

// All collectives below: called by every rank of the default group in the same
// order. They block unless `async_op` is set; then the tensors must not be
// touched until `Work::wait` returned. Any dtype of real numbers (floating,
// half, bfloat16, integers; bool with MIN and MAX; broadcast and all_gather
// also bool and complex). Non-contiguous tensors are accepted, tensors of zero
// elements too. In a world of one they return at once. On failure:
// InvalidArgument (no group, wrong arguments, a device the backend does not
// serve), Unsupported (dtype), MismatchError (ranks differ in operation, shape,
// dtype or root; raised on all), TimeoutError, PeerLost, BackendError. After
// any of the last four the group cannot be used again.

/// Reduces `tensor` over all ranks in place; afterwards all ranks hold the same
/// bits. Mirrors `torch.distributed.all_reduce`.
LOCKSTEP_API Work all_reduce(at::Tensor& tensor,
                             const AllReduceOptions& options = {});

/// Overwrites `tensor` with rank `src`'s. Mirrors
/// `torch.distributed.broadcast`.
LOCKSTEP_API Work broadcast(at::Tensor& tensor,
                            const BroadcastOptions& options = {});

/// `outputs[r]` becomes rank r's `input`; `outputs` holds world-size tensors of
/// `input`'s shape and dtype. Mirrors `torch.distributed.all_gather`.
LOCKSTEP_API Work all_gather(std::vector<at::Tensor>& outputs,
                             const at::Tensor& input,
                             const AllGatherOptions& options = {});

/// `output` (world size x input.numel() elements, same dtype) becomes the
/// ranks' inputs in rank order. Mirrors
/// `torch.distributed.all_gather_into_tensor`.
LOCKSTEP_API Work all_gather_into_tensor(at::Tensor& output,
                                         const at::Tensor& input,
                                         const AllGatherOptions& options = {});

/// Reduces `inputs[r]` over all ranks into rank r's `output`. Mirrors
/// `torch.distributed.reduce_scatter`.
LOCKSTEP_API Work reduce_scatter(at::Tensor& output,
                                 const std::vector<at::Tensor>& inputs,
                                 const ReduceScatterOptions& options = {});

/// The same with one input of world size x output.numel() elements. Mirrors
/// `torch.distributed.reduce_scatter_tensor`.
LOCKSTEP_API Work
reduce_scatter_tensor(at::Tensor& output,
                      const at::Tensor& input,
                      const ReduceScatterOptions& options = {});

/// Returns when every rank has called it. Mirrors `torch.distributed.barrier`.
LOCKSTEP_API Work barrier(const BarrierOptions& options = {});

}  // namespace lockstep
