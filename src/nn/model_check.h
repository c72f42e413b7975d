#pragma once

#include <memory>
#include <vector>

#include "distributed/group.h"
#include "lockstep/nn/reducer.h"

namespace lockstep::nn {

/// Collective over the group. Throws MismatchError on every rank that names the
/// first entry in which some rank's model differs from that of its rank 0:
/// name, shape, strides, dtype, device type or requires_grad, of parameters
/// first and buffers then.
void check_same_model(const std::vector<NamedTensor>& parameters,
                      const std::vector<NamedTensor>& buffers,
                      const std::shared_ptr<distributed::Group>& group);

}  // namespace lockstep::nn
