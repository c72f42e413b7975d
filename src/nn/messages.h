#pragma once

#include <string>
#include <vector>

#include "nn/transport.h"

/// The texts about passes that could not be averaged.
namespace lockstep::nn {

/// Parameters got no gradient in a backward pass.
std::string unready_message(const std::vector<NamedTensor>& parameters,
                            const std::vector<size_t>& missing);

/// The `kind` of tensor with this name has another dtype or size than before.
std::string converted_message(const char* kind, const std::string& name);

/// The pass ended on `rank` before its gradients of `missing` were there; none
/// are given where it ended with an exception.
std::string gave_up_message(int rank,
                            const std::vector<NamedTensor>& parameters,
                            const std::vector<size_t>& missing);

/// The last pass ended on `rank` with an exception when other ranks could
/// average it.
std::string gave_up_late_message(int rank);

}  // namespace lockstep::nn
