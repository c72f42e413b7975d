#pragma once

#include <string>
#include <vector>

#include "nn/transport.h"

namespace lockstep::nn {

/// The text about parameters that got no gradient in a backward pass.
std::string unready_message(const std::vector<NamedTensor>& parameters,
                            const std::vector<size_t>& missing);

}  // namespace lockstep::nn
