#include "torch_compat/version.h"

#include <torch/version.h>

namespace lockstep::torch_compat {

std::string torch_version() {
  return TORCH_VERSION;
}

}  // namespace lockstep::torch_compat
