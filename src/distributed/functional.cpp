#include "lockstep/distributed/functional.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "distributed/differentiable.h"
#include "distributed/group.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep::functional {
namespace {

using at::Tensor;
using distributed::differentiable;
using Tensors = std::vector<Tensor>;

/// The options with the group that they mean now: the backward pass may run
/// when, or where, another one is the default.
template <class Options>
Options bound(const char* operation, Options options) {
  if (options.async_op) {
    throw InvalidArgument(
        "differentiable collectives have no asynchronous form; leave async_op "
        "out",
        {.operation = operation});
  }
  if (!options.group.held()) {
    options.group = ProcessGroup(distributed::require_default_group(operation));
  }
  if (!options.group.is_member()) {
    throw InvalidArgument("this rank does not belong to the group",
                          {.operation = operation});
  }
  return options;
}

void check_defined(const char* operation, const Tensors& inputs) {
  for (const auto& tensor : inputs) {
    if (tensor.defined()) continue;
    throw InvalidArgument("a tensor is undefined", {.operation = operation});
  }
}

void check_gradient(const char* operation, ReduceOp op, const Tensors& inputs) {
  if (op == ReduceOp::SUM || op == ReduceOp::AVG) return;
  if (!distributed::needs_gradient(inputs)) return;
  throw Unsupported(
      "only SUM and AVG have a gradient here; detach the tensor, or take "
      "another reduction",
      {.operation = operation});
}

/// The gradient of a reduction's summands.
Tensor of_summands(const Tensor& gradient, ReduceOp op, int ranks) {
  return op == ReduceOp::AVG ? gradient / ranks : gradient;
}

/// Runs a collective that overwrites its tensor on a copy.
template <class Run, class Backward>
Tensor with_copy(const char* operation,
                 const Tensor& tensor,
                 Run run,
                 Backward backward) {
  check_defined(operation, {tensor});
  return differentiable(
      operation,
      {tensor},
      [&]() -> Tensors {
        auto result = tensor.clone(at::MemoryFormat::Contiguous);
        run(result);
        return {result};
      },
      [backward](const Tensors& gradients) -> Tensors {
        return {backward(gradients[0])};
      })[0];
}

Tensor uninitialised(const Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options());
}

Tensors uninitialised(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(uninitialised(tensor));
  return result;
}

Tensor with_rows(const Tensor& tensor, int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes.at(0) = rows;
  return at::empty(sizes, tensor.options());
}

/// Zeros that stay a function of `tensor`, so that all ranks go through the
/// collectives of a second backward pass.
Tensor zeros_from(const Tensor& tensor) {
  const auto everywhere =
      at::ones_like(tensor, tensor.options().dtype(at::kBool));
  return tensor.masked_fill(everywhere, 0);
}

/// Whether this rank is the root that the options name.
bool is_root(const ProcessGroup& group,
             const std::optional<int>& global_rank,
             const std::optional<int>& group_rank) {
  if (group_rank) return group.rank() == *group_rank;
  return get_global_rank(group, group.rank()) == global_rank.value_or(0);
}

BroadcastOptions from_root(const ReduceOptions& options) {
  return {.src = options.dst,
          .group = options.group,
          .timeout = options.timeout,
          .group_src = options.group_dst};
}

ReduceOptions to_root(const BroadcastOptions& options) {
  return {.dst = options.src,
          .group = options.group,
          .timeout = options.timeout,
          .group_dst = options.group_src};
}

ScatterOptions from_root(const GatherOptions& options) {
  return {.src = options.dst,
          .group = options.group,
          .timeout = options.timeout,
          .group_src = options.group_dst};
}

GatherOptions to_root(const ScatterOptions& options) {
  return {.dst = options.src,
          .group = options.group,
          .timeout = options.timeout,
          .group_dst = options.group_src};
}

template <class To, class From>
To with_group_of(const From& options) {
  To result;
  result.group = options.group;
  result.timeout = options.timeout;
  return result;
}

}  // namespace

Tensor all_reduce(const Tensor& tensor, const AllReduceOptions& options) {
  constexpr auto kName = "functional::all_reduce";
  const auto own = bound(kName, options);
  check_gradient(kName, own.op, {tensor});
  return with_copy(
      kName,
      tensor,
      [&](Tensor& result) { lockstep::all_reduce(result, own); },
      [own](const Tensor& gradient) { return all_reduce(gradient, own); });
}

Tensor broadcast(const Tensor& tensor, const BroadcastOptions& options) {
  constexpr auto kName = "functional::broadcast";
  const auto own = bound(kName, options);
  return with_copy(
      kName,
      tensor,
      [&](Tensor& result) { lockstep::broadcast(result, own); },
      [own](const Tensor& gradient) {
        const auto sum = reduce(gradient, to_root(own));
        const bool is_source = is_root(own.group, own.src, own.group_src);
        return is_source ? sum : zeros_from(sum);
      });
}

Tensor reduce(const Tensor& tensor, const ReduceOptions& options) {
  constexpr auto kName = "functional::reduce";
  const auto own = bound(kName, options);
  check_gradient(kName, own.op, {tensor});
  return with_copy(
      kName,
      tensor,
      [&](Tensor& result) { lockstep::reduce(result, own); },
      [own](const Tensor& gradient) {
        return of_summands(
            broadcast(gradient, from_root(own)), own.op, own.group.size());
      });
}

Tensors all_gather(const Tensor& tensor, const AllGatherOptions& options) {
  constexpr auto kName = "functional::all_gather";
  const auto own = bound(kName, options);
  check_defined(kName, {tensor});
  return differentiable(
      kName,
      {tensor},
      [&] {
        Tensors outputs;
        for (int r = 0; r < own.group.size(); ++r) {
          outputs.push_back(uninitialised(tensor));
        }
        lockstep::all_gather(outputs, tensor, own);
        return outputs;
      },
      [own](const Tensors& gradients) -> Tensors {
        return {reduce_scatter(gradients,
                               with_group_of<ReduceScatterOptions>(own))};
      });
}

Tensor all_gather_into_tensor(const Tensor& tensor,
                              const AllGatherOptions& options) {
  constexpr auto kName = "functional::all_gather_into_tensor";
  const auto own = bound(kName, options);
  check_defined(kName, {tensor});
  const auto rows = tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor;
  return differentiable(
      kName,
      {rows},
      [&]() -> Tensors {
        auto output = with_rows(rows, rows.size(0) * own.group.size());
        lockstep::all_gather_into_tensor(output, rows, own);
        return {output};
      },
      [own](const Tensors& gradients) -> Tensors {
        return {reduce_scatter_tensor(
            gradients[0], with_group_of<ReduceScatterOptions>(own))};
      })[0];
}

Tensor reduce_scatter(const Tensors& inputs,
                      const ReduceScatterOptions& options) {
  constexpr auto kName = "functional::reduce_scatter";
  const auto own = bound(kName, options);
  check_defined(kName, inputs);
  check_gradient(kName, own.op, inputs);
  if (inputs.empty()) {
    throw InvalidArgument("inputs holds no tensor; one per rank is needed",
                          {.operation = kName});
  }
  return differentiable(
      kName,
      inputs,
      [&]() -> Tensors {
        auto output = uninitialised(inputs[0]);
        lockstep::reduce_scatter(output, inputs, own);
        return {output};
      },
      [own](const Tensors& gradients) -> Tensors {
        return all_gather(of_summands(gradients[0], own.op, own.group.size()),
                          with_group_of<AllGatherOptions>(own));
      })[0];
}

Tensor reduce_scatter_tensor(const Tensor& input,
                             const ReduceScatterOptions& options) {
  constexpr auto kName = "functional::reduce_scatter_tensor";
  const auto own = bound(kName, options);
  check_defined(kName, {input});
  check_gradient(kName, own.op, {input});
  const int ranks = own.group.size();
  if (input.dim() == 0 || input.size(0) % ranks != 0) {
    throw InvalidArgument("input needs a first dimension that " +
                              std::to_string(ranks) + " ranks can share, not " +
                              c10::str(input.sizes()),
                          {.operation = kName});
  }
  return differentiable(
      kName,
      {input},
      [&]() -> Tensors {
        auto output = with_rows(input, input.size(0) / ranks);
        lockstep::reduce_scatter_tensor(output, input, own);
        return {output};
      },
      [own, ranks](const Tensors& gradients) -> Tensors {
        return {all_gather_into_tensor(of_summands(gradients[0], own.op, ranks),
                                       with_group_of<AllGatherOptions>(own))};
      })[0];
}

Tensors gather(const Tensor& tensor, const GatherOptions& options) {
  constexpr auto kName = "functional::gather";
  const auto own = bound(kName, options);
  check_defined(kName, {tensor});
  return differentiable(
      kName,
      {tensor},
      [&] {
        Tensors outputs;
        for (int r = 0; r < own.group.size(); ++r) {
          outputs.push_back(at::zeros(tensor.sizes(), tensor.options()));
        }
        if (is_root(own.group, own.dst, own.group_dst)) {
          lockstep::gather(tensor, outputs, own);
        } else {
          lockstep::gather(tensor, own);
        }
        return outputs;
      },
      [own](const Tensors& gradients) -> Tensors {
        return {functional::scatter(gradients, from_root(own))};
      });
}

Tensor scatter(const Tensors& scatter_list, const ScatterOptions& options) {
  constexpr auto kName = "functional::scatter";
  const auto own = bound(kName, options);
  const auto ranks = static_cast<size_t>(own.group.size());
  if (scatter_list.size() != ranks) {
    throw InvalidArgument("scatter_list holds " +
                              std::to_string(scatter_list.size()) +
                              " tensors; every rank passes one per rank, " +
                              std::to_string(ranks),
                          {.operation = kName});
  }
  check_defined(kName, scatter_list);
  for (const auto& tensor : scatter_list) {
    if (tensor.sizes() == scatter_list[0].sizes() &&
        tensor.scalar_type() == scatter_list[0].scalar_type()) {
      continue;
    }
    throw InvalidArgument(
        "the tensors of scatter_list must have one shape and one dtype",
        {.operation = kName});
  }
  return differentiable(
      kName,
      scatter_list,
      [&]() -> Tensors {
        auto output = uninitialised(scatter_list[0]);
        const bool is_source = is_root(own.group, own.src, own.group_src);
        lockstep::scatter(output, is_source ? scatter_list : Tensors(), own);
        return {output};
      },
      [own](const Tensors& gradients) -> Tensors {
        return functional::gather(gradients[0], to_root(own));
      })[0];
}

Tensors all_to_all(const Tensors& output_tensor_list,
                   const Tensors& input_tensor_list,
                   const AllToAllOptions& options) {
  constexpr auto kName = "functional::all_to_all";
  const auto own = bound(kName, options);
  check_defined(kName, input_tensor_list);
  check_defined(kName, output_tensor_list);
  return differentiable(
      kName,
      input_tensor_list,
      [&] {
        auto outputs = uninitialised(output_tensor_list);
        lockstep::all_to_all(outputs, input_tensor_list, own);
        return outputs;
      },
      [own, shapes = uninitialised(input_tensor_list)](const Tensors& gradients)
          -> Tensors { return all_to_all(shapes, gradients, own); });
}

Tensor all_to_all_single(const Tensor& input,
                         const AllToAllSingleOptions& options) {
  constexpr auto kName = "functional::all_to_all_single";
  const auto own = bound(kName, options);
  check_defined(kName, {input});
  if (input.dim() == 0) {
    throw InvalidArgument("input must have rows, not be a scalar",
                          {.operation = kName});
  }
  return differentiable(
      kName,
      {input},
      [&]() -> Tensors {
        const auto& splits = own.output_split_sizes;
        const auto rows =
            splits.empty()
                ? input.size(0)
                : std::accumulate(splits.begin(), splits.end(), int64_t{0});
        auto output = with_rows(input, std::max<int64_t>(rows, 0));
        lockstep::all_to_all_single(output, input, own);
        return {output};
      },
      [own](const Tensors& gradients) -> Tensors {
        auto back = own;
        std::swap(back.output_split_sizes, back.input_split_sizes);
        return {all_to_all_single(gradients[0], back)};
      })[0];
}

}  // namespace lockstep::functional
