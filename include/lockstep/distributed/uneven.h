#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/collectives.h"

namespace lockstep {

// Collectives whose parts differ in size from rank to rank. MismatchError on
// every rank where one contributes another number of elements than another
// expects; the kind of reduction is not compared. Otherwise as the collective
// whose options they take; a group with Python ranks (`interop`) does not serve
// them.

/// `outputs[r]` becomes rank r's `input`, which may have any number of
/// elements: that of `outputs[r]`. Mirrors MPI_Allgatherv, and
/// `torchcomms.all_gather_v`.
LOCKSTEP_API Work all_gather_v(std::vector<at::Tensor>& outputs,
                               const at::Tensor& input,
                               const AllGatherOptions& options = {});

/// Reduces all ranks' `inputs[r]` into rank r's `output`, which has as many
/// elements. The values are reduced in the order of the ranks. Mirrors
/// MPI_Reduce_scatter, and `torchcomms.reduce_scatter_v`.
LOCKSTEP_API Work reduce_scatter_v(at::Tensor& output,
                                   const std::vector<at::Tensor>& inputs,
                                   const ReduceScatterOptions& options = {});

}  // namespace lockstep
