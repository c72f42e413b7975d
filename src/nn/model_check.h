#pragma once

#include <vector>

#include "lockstep/nn/reducer.h"

namespace lockstep::nn {

/// Collective over the default group. Throws MismatchError on every rank that
/// names the first entry in which some rank's model differs from rank 0's:
/// name, shape, strides, dtype, device type or requires_grad, of parameters
/// first and buffers then.
void check_same_model(const std::vector<NamedTensor>& parameters,
                      const std::vector<NamedTensor>& buffers);

}  // namespace lockstep::nn
