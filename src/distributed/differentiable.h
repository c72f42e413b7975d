#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lockstep::distributed {

using Tensors = std::vector<at::Tensor>;

/// Whether autograd wants gradients of one of the tensors.
bool needs_gradient(const Tensors& inputs);

/// Gives what `forward()` returns, which autograd does not look into, a place
/// in its graph as functions of `inputs`: `backward(gradients)` takes the
/// gradients of all of it, zeros included, and returns those of the inputs. The
/// outputs must be new tensors.
Tensors differentiable(const char* name,
                       const Tensors& inputs,
                       const std::function<Tensors()>& forward,
                       std::function<Tensors(const Tensors&)> backward);

}  // namespace lockstep::distributed
