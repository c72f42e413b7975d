#include "nn/messages.h"

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

std::string converted_message(const char* kind, const std::string& name) {
  return std::string(kind) + " \"" + name +
         "\" was converted after wrapping; call to() on the module before "
         "wrapping it";
}

std::string gave_up_message(int rank,
                            const std::vector<NamedTensor>& parameters,
                            const std::vector<size_t>& missing) {
  const std::string who = "on rank " + std::to_string(rank) + ' ';
  if (!missing.empty()) return who + unready_message(parameters, missing);
  return who +
         "the backward pass ended with an exception while this rank waited "
         "for its gradients; these gradients are not averaged, drop them "
         "with zero_grad on all ranks";
}

std::string gave_up_late_message(int rank) {
  return "the last backward pass ended with an exception on rank " +
         std::to_string(rank) +
         " after other ranks could average its gradients, so the ranks' "
         "parameters may differ; load a checkpoint on all ranks, or copy rank "
         "0's parameters to them";
}

}  // namespace lockstep::nn
