#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "comm/backends/shm/layout.h"
#include "lockstep/distributed/collectives.h"

namespace lockstep::comm::shm {

/// The operation's name as in PyTorch: "all_reduce".
const char* name(Operation operation) noexcept;

/// `tensor` is the one that every rank has one of: what is reduced, broadcast
/// or gathered, or the output of a reduce_scatter.
Fingerprint fingerprint(Operation operation, const at::Tensor& tensor);
Fingerprint fingerprint(Operation operation,
                        const at::Tensor& tensor,
                        ReduceOp op);

/// "all_reduce of Float [4, 2] with SUM".
std::string describe(const Fingerprint& fingerprint);

}  // namespace lockstep::comm::shm
