#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/collectives.h"

namespace lockstep {

// Several collectives as one: the tensors travel in one buffer, so many small
// ones cost little more than one. All tensors of a call have one dtype, and
// their number and sizes are the same on all ranks: what ranks compare is the
// number of all elements together. Otherwise as the collective whose options
// they take.

/// `all_reduce` of each tensor. Mirrors
/// `torch.distributed.all_reduce_coalesced`.
LOCKSTEP_API Work all_reduce_coalesced(std::vector<at::Tensor>& tensors,
                                       const AllReduceOptions& options = {});

/// `output_tensor_lists[r][i]` becomes rank r's `input_tensor_list[i]`. Mirrors
/// `torch.distributed.all_gather_coalesced`.
LOCKSTEP_API Work
all_gather_coalesced(std::vector<std::vector<at::Tensor>>& output_tensor_lists,
                     const std::vector<at::Tensor>& input_tensor_list,
                     const AllGatherOptions& options = {});

/// `all_gather_into_tensor` of each pair. Mirrors c10d's
/// `allgather_into_tensor_coalesced`.
LOCKSTEP_API Work
all_gather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs,
                                 const AllGatherOptions& options = {});

/// `reduce_scatter_tensor` of each pair. Mirrors c10d's
/// `reduce_scatter_tensor_coalesced`.
LOCKSTEP_API Work
reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                const std::vector<at::Tensor>& inputs,
                                const ReduceScatterOptions& options = {});

}  // namespace lockstep
