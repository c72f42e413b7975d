#include "nn/unready.h"

namespace lockstep::nn {

std::string unready_message(const std::vector<NamedTensor>& parameters,
                            const std::vector<size_t>& missing) {
  std::string names;
  for (const size_t index : missing) {
    if (!names.empty()) names += ", ";
    names += '"' + parameters[index].name + '"';
  }
  return "backward gave no gradient to " + names +
         ", so the ranks' gradients cannot be averaged; use every trainable "
         "parameter in the loss, or call requires_grad_(false) on the others "
         "before wrapping the module";
}

}  // namespace lockstep::nn
