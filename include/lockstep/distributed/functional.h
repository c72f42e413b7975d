#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/collectives.h"

/// Collectives that autograd differentiates. Each returns new tensors and
/// leaves its arguments as they are; blocking. What a rank's backward pass gets
/// is the gradient of the sum of all ranks' losses.
///
/// The backward pass is a collective, too: all ranks of the group go through it
/// in the same order, so on each of them the tensor must need a gradient, and
/// the result must be part of the loss (add 0 times its sum where it is not).
/// Backward passes can be differentiated again.
///
/// Options and errors are those of the collective of the same name; besides,
/// InvalidArgument with `async_op` and in a rank that is no member, and
/// Unsupported where a gradient is needed through another reduction than SUM
/// and AVG; backward passes of complex tensors raise it, too, where they
/// reduce. Mirrors `torch.distributed.nn.functional`.
namespace lockstep::functional {

/// The reduction of all ranks' tensors, in every rank.
[[nodiscard]] LOCKSTEP_API at::Tensor all_reduce(
    const at::Tensor& tensor, const AllReduceOptions& options = {});

/// Rank `src`'s tensor, in every rank. The other ranks' tensors give shape and
/// dtype; their gradient is zero.
[[nodiscard]] LOCKSTEP_API at::Tensor broadcast(
    const at::Tensor& tensor, const BroadcastOptions& options = {});

/// The reduction of all ranks' tensors in rank `dst`; elsewhere a copy of the
/// own tensor, through which no gradient comes: all get that of rank `dst`.
[[nodiscard]] LOCKSTEP_API at::Tensor reduce(const at::Tensor& tensor,
                                             const ReduceOptions& options = {});

/// All ranks' tensors, which have one shape, in rank order.
[[nodiscard]] LOCKSTEP_API std::vector<at::Tensor> all_gather(
    const at::Tensor& tensor, const AllGatherOptions& options = {});

/// The same one after the other along the first dimension.
[[nodiscard]] LOCKSTEP_API at::Tensor all_gather_into_tensor(
    const at::Tensor& tensor, const AllGatherOptions& options = {});

/// The reduction of all ranks' `inputs[rank]`; the inputs have one shape.
[[nodiscard]] LOCKSTEP_API at::Tensor reduce_scatter(
    const std::vector<at::Tensor>& inputs,
    const ReduceScatterOptions& options = {});

/// The same of one tensor, cut along the first dimension, which the number of
/// ranks divides.
[[nodiscard]] LOCKSTEP_API at::Tensor reduce_scatter_tensor(
    const at::Tensor& input, const ReduceScatterOptions& options = {});

/// All ranks' tensors, which have one shape, in rank `dst`; elsewhere zeros.
[[nodiscard]] LOCKSTEP_API std::vector<at::Tensor> gather(
    const at::Tensor& tensor, const GatherOptions& options = {});

/// Rank `src`'s `scatter_list[rank]`. The other ranks' lists give the shape;
/// their gradient is zero.
[[nodiscard]] LOCKSTEP_API at::Tensor scatter(
    const std::vector<at::Tensor>& scatter_list,
    const ScatterOptions& options = {});

/// `result[r]` is rank r's `input_tensor_list[rank]`, in the shape of
/// `output_tensor_list[r]`, whose values do not matter.
[[nodiscard]] LOCKSTEP_API std::vector<at::Tensor> all_to_all(
    const std::vector<at::Tensor>& output_tensor_list,
    const std::vector<at::Tensor>& input_tensor_list,
    const AllToAllOptions& options = {});

/// The same with the rows of tensors; the result has the sum of
/// `output_split_sizes` of them, or as many as `input` without.
[[nodiscard]] LOCKSTEP_API at::Tensor all_to_all_single(
    const at::Tensor& input, const AllToAllSingleOptions& options = {});

}  // namespace lockstep::functional
