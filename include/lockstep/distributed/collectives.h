#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/process_group.h"

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

  /// Blocks until the operation ended; it ends by itself at its timeout. With
  /// `timeout` this wait ends then at the latest, with zero or less at once:
  /// the operation goes on, and its tensors must still not be touched. \throws
  /// the operation's error; TimeoutError when `timeout` was too short
  void wait(std::optional<std::chrono::milliseconds> timeout = {}) const;
  /// Whether the operation ended, well or not. Never blocks.
  [[nodiscard]] bool is_completed() const;

 private:
  std::shared_ptr<Impl> impl_;
};

// Members that all options below share:
//   async_op  return at once; see `Work`
//   group     the ranks that take part; empty: the default group
//   timeout   bound of this operation from its beginning; unset: the group's
// Roots (src, dst) are global ranks; group_src and group_dst are ranks in the
// group. At most one of the two may be given; neither: global rank 0.

struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};
struct BroadcastOptions {
  std::optional<int> src = {};  ///< the rank whose tensor all get
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::optional<int> group_src = {};
};
struct AllGatherOptions {
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::SUM;
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};
struct ReduceOptions {
  std::optional<int> dst = {};  ///< the rank that gets the result
  ReduceOp op = ReduceOp::SUM;
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::optional<int> group_dst = {};
};
struct GatherOptions {
  std::optional<int> dst = {};  ///< the rank that gets all tensors
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::optional<int> group_dst = {};
};
struct ScatterOptions {
  std::optional<int> src = {};  ///< the rank that has all tensors
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::optional<int> group_src = {};
};
struct AllToAllOptions {
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};
struct AllToAllSingleOptions {
  /// Rows of `output` that come from each rank, and rows of `input` that go to
  /// each; empty: equally many.
  std::vector<int64_t> output_split_sizes{};
  std::vector<int64_t> input_split_sizes{};
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};
struct BarrierOptions {
  bool async_op = false;
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

// All collectives below: called by every rank of the group in the same order;
// in a rank that is no member they log a warning and do nothing. They block
// unless `async_op` is set; then the tensors must not be touched until
// `Work::wait` returned. Any dtype of real numbers (floating, half, bfloat16,
// integers; bool with MIN and MAX; what only moves also bool and complex).
// Non-contiguous tensors are accepted, tensors of zero elements too. In a group
// of one they return at once. "World size" below is the size of the group, and
// "rank r" its rank r. On failure: InvalidArgument (no group, wrong arguments,
// a device the backend does not serve), Unsupported (dtype), MismatchError
// (ranks differ in operation, shape, dtype or root; raised on all),
// TimeoutError, PeerLost, BackendError. After any of the last four the group
// cannot be used again.

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

/// The newer name of `all_gather_into_tensor`. Mirrors
/// `torch.distributed.all_gather_single`.
inline Work all_gather_single(at::Tensor& output,
                              const at::Tensor& input,
                              const AllGatherOptions& options = {}) {
  return all_gather_into_tensor(output, input, options);
}

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

/// The newer name of `reduce_scatter_tensor`. Mirrors
/// `torch.distributed.reduce_scatter_single`.
inline Work reduce_scatter_single(at::Tensor& output,
                                  const at::Tensor& input,
                                  const ReduceScatterOptions& options = {}) {
  return reduce_scatter_tensor(output, input, options);
}

/// Reduces `tensor` over all ranks into rank `dst`'s; the others' stay as they
/// are. Mirrors `torch.distributed.reduce`.
LOCKSTEP_API Work reduce(at::Tensor& tensor, const ReduceOptions& options = {});

/// On rank `dst`, `gather_list[r]` becomes rank r's `tensor`; it holds world
/// size tensors of `tensor`'s shape and dtype. Mirrors
/// `torch.distributed.gather`.
LOCKSTEP_API Work gather(const at::Tensor& tensor,
                         std::vector<at::Tensor>& gather_list,
                         const GatherOptions& options = {});
/// The same on the other ranks, which have no list.
LOCKSTEP_API Work gather(const at::Tensor& tensor,
                         const GatherOptions& options = {});

/// `tensor` becomes rank `src`'s `scatter_list[rank]`; it holds world size
/// tensors of `tensor`'s shape and dtype, of which `tensor` may only be the own
/// one, and is empty on the other ranks. Mirrors `torch.distributed.scatter`.
LOCKSTEP_API Work scatter(at::Tensor& tensor,
                          const std::vector<at::Tensor>& scatter_list = {},
                          const ScatterOptions& options = {});

/// `output_tensor_list[r]` becomes rank r's `input_tensor_list[rank]`. Shapes
/// may differ between pairs of ranks; the dtype is one, and outputs share no
/// memory with inputs. MismatchError on every rank where one sends another
/// number of elements than the other expects. Mirrors
/// `torch.distributed.all_to_all`.
LOCKSTEP_API Work all_to_all(std::vector<at::Tensor>& output_tensor_list,
                             const std::vector<at::Tensor>& input_tensor_list,
                             const AllToAllOptions& options = {});

/// The same with the rows (first dimension) of two tensors of one dtype, which
/// share no memory. Mirrors `torch.distributed.all_to_all_single`.
LOCKSTEP_API Work all_to_all_single(at::Tensor& output,
                                    const at::Tensor& input,
                                    const AllToAllSingleOptions& options = {});

/// Returns when every rank has called it. Mirrors `torch.distributed.barrier`.
LOCKSTEP_API Work barrier(const BarrierOptions& options = {});

}  // namespace lockstep
