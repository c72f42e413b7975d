#include "distributed/differentiable.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <utility>

namespace lockstep::distributed {
namespace {

using torch::autograd::variable_list;

class Backward final : public torch::autograd::Node {
 public:
  Backward(std::string name,
           std::function<Tensors(const Tensors&)> backward,
           torch::autograd::edge_list next)
      : Node(std::move(next)),
        name_(std::move(name)),
        backward_(std::move(backward)) {}

  [[nodiscard]] std::string name() const override { return name_; }

 private:
  variable_list apply(variable_list&& gradients) override {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) {
        gradients[i] = input_metadata(i).zeros_like();
      }
    }
    return backward_(gradients);
  }

  std::string name_;
  std::function<Tensors(const Tensors&)> backward_;
};

}  // namespace

bool needs_gradient(const Tensors& inputs) {
  return at::GradMode::is_enabled() &&
         std::any_of(inputs.begin(), inputs.end(), [](const auto& tensor) {
           return tensor.defined() && tensor.requires_grad();
         });
}

Tensors differentiable(const char* name,
                       const Tensors& inputs,
                       const std::function<Tensors()>& forward,
                       std::function<Tensors(const Tensors&)> backward) {
  Tensors outputs;
  {
    const at::NoGradGuard no_grad;
    outputs = forward();
  }
  if (!needs_gradient(inputs)) return outputs;
  const auto node = c10::make_intrusive<Backward>(
      name, std::move(backward), torch::autograd::collect_next_edges(inputs));
  for (auto& output : outputs) torch::autograd::set_history(output, node);
  return outputs;
}

}  // namespace lockstep::distributed
