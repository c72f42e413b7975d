#include "lockstep/distributed/uneven.h"

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/kernels/reduce.h"
#include "distributed/call.h"

namespace lockstep {
namespace {

using distributed::Call;
using distributed::contiguous;
using distributed::CopyBack;
using distributed::Tensors;

size_t own(const Call& call) {
  return static_cast<size_t>(call.group().rank);
}

}  // namespace

Work all_gather_v(Tensors& outputs,
                  const at::Tensor& input,
                  const AllGatherOptions& options) {
  Call call("all_gather_v", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_tensor(input, "input");
  call.check_count(outputs, "outputs");
  for (const auto& output : outputs) {
    call.check_output(output, "an output");
    call.check_same_dtype(output, input);
    call.check_apart(output, input);
  }
  call.check_numel("input", input.numel(), outputs[own(call)].numel());
  auto opts = call.c10d_options<c10d::AllToAllOptions>();
  Tensors to = contiguous(outputs);
  Tensors from(outputs.size(), contiguous(input));
  return call.run([&] { return call.backend().alltoall(to, from, opts); },
                  CopyBack{to, outputs});
}

Work reduce_scatter_v(at::Tensor& output,
                      const Tensors& inputs,
                      const ReduceScatterOptions& options) {
  Call call("reduce_scatter_v", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_output(output, "output");
  call.check_reducible(output, options.op);
  call.check_count(inputs, "inputs");
  for (const auto& input : inputs) {
    call.check_tensor(input, "an input");
    call.check_same_dtype(output, input);
  }
  call.check_numel("output", output.numel(), inputs[own(call)].numel());
  auto opts = call.c10d_options<c10d::AllToAllOptions>();
  Tensors from = contiguous(inputs);
  Tensors summands;
  for (size_t r = 0; r < inputs.size(); ++r) {
    summands.push_back(at::empty({output.numel()}, output.options()));
  }
  const auto reduce = [=, op = options.op] {
    std::vector<const void*> sources;
    for (const auto& summand : summands) {
      sources.push_back(summand.const_data_ptr());
    }
    const at::NoGradGuard no_grad;
    auto result = at::empty({output.numel()}, output.options());
    comm::kernels::reduce(op,
                          output.scalar_type(),
                          result.data_ptr(),
                          sources.data(),
                          static_cast<int>(sources.size()),
                          static_cast<size_t>(output.numel()));
    output.copy_(result.view(output.sizes()));
  };
  return call.run([&] { return call.backend().alltoall(summands, from, opts); },
                  reduce);
}

}  // namespace lockstep
