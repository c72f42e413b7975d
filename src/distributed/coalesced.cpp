#include "lockstep/distributed/coalesced.h"

#include <ATen/ATen.h>

#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "distributed/call.h"

namespace lockstep {
namespace {

using distributed::Call;
using distributed::Tensors;

int64_t numel_of(const Tensors& tensors) {
  int64_t result = 0;
  for (const auto& tensor : tensors) result += tensor.numel();
  return result;
}

/// All tensors' elements one after the other.
at::Tensor flatten(const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  Tensors flat;
  flat.reserve(tensors.size());
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape(-1));
  return at::cat(flat).resolve_conj().resolve_neg();
}

/// The opposite.
void unflatten(const at::Tensor& flat, const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  int64_t start = 0;
  for (const auto& tensor : tensors) {
    const int64_t numel = tensor.numel();
    tensor.copy_(flat.narrow(0, start, numel).view(tensor.sizes()));
    start += numel;
  }
}

void check_one_dtype(const Call& call,
                     const Tensors& tensors,
                     const char* name) {
  if (tensors.empty()) call.fail(std::string(name) + " holds no tensor");
  for (const auto& tensor : tensors) {
    call.check_tensor(tensor, name);
    call.check_one_dtype(tensors[0], tensor);
  }
}

void check_outputs(const Call& call,
                   const Tensors& outputs,
                   const Tensors& inputs,
                   const char* name) {
  if (outputs.size() != inputs.size()) {
    call.fail(std::string(name) + " holds " + std::to_string(outputs.size()) +
              " tensors for " + std::to_string(inputs.size()) + " inputs");
  }
  for (const auto& output : outputs) {
    call.check_output(output, name);
    call.check_one_dtype(inputs[0], output);
  }
}

/// Starts the gathering of `flat`; `finish(gathered)` gets one row per rank.
template <class Finish>
Work gather_flat(Call& call, const Tensors& inputs, Finish finish) {
  auto flat = flatten(inputs);
  auto gathered =
      at::empty({call.group().world_size, flat.numel()}, flat.options());
  auto options = call.c10d_options<c10d::AllgatherOptions>();
  return call.run(
      [&] { return call.backend()._allgather_base(gathered, flat, options); },
      [=, keep = flat] {
        const at::NoGradGuard no_grad;
        finish(gathered);
      });
}

}  // namespace

Work all_reduce_coalesced(Tensors& tensors, const AllReduceOptions& options) {
  Call call("all_reduce_coalesced", options);
  if (!call.is_member()) return Work(nullptr);
  check_one_dtype(call, tensors, "a tensor");
  for (const auto& tensor : tensors) call.check_output(tensor, "a tensor");
  call.check_reducible(tensors[0], options.op);
  Tensors flat = {flatten(tensors)};
  auto opts = call.c10d_options<c10d::AllreduceOptions>();
  opts.reduceOp = distributed::to_c10d(options.op);
  return call.run([&] { return call.backend().allreduce(flat, opts); },
                  [=] { unflatten(flat[0], tensors); });
}

Work all_gather_coalesced(std::vector<Tensors>& output_tensor_lists,
                          const Tensors& input_tensor_list,
                          const AllGatherOptions& options) {
  Call call("all_gather_coalesced", options);
  if (!call.is_member()) return Work(nullptr);
  check_one_dtype(call, input_tensor_list, "an input");
  const auto ranks = static_cast<size_t>(call.group().world_size);
  if (output_tensor_lists.size() != ranks) {
    call.fail("output_tensor_lists holds " +
              std::to_string(output_tensor_lists.size()) +
              " lists; one per rank is needed, " + std::to_string(ranks));
  }
  for (const auto& outputs : output_tensor_lists) {
    check_outputs(call, outputs, input_tensor_list, "a list of outputs");
    for (size_t i = 0; i < outputs.size(); ++i) {
      call.check_numel(
          "an output", outputs[i].numel(), input_tensor_list[i].numel());
    }
  }
  return gather_flat(call,
                     input_tensor_list,
                     [lists = output_tensor_lists](const at::Tensor& gathered) {
                       for (size_t r = 0; r < lists.size(); ++r) {
                         unflatten(gathered[static_cast<int64_t>(r)], lists[r]);
                       }
                     });
}

Work all_gather_into_tensor_coalesced(Tensors& outputs,
                                      const Tensors& inputs,
                                      const AllGatherOptions& options) {
  Call call("all_gather_into_tensor_coalesced", options);
  if (!call.is_member()) return Work(nullptr);
  check_one_dtype(call, inputs, "an input");
  check_outputs(call, outputs, inputs, "an output");
  const int64_t ranks = call.group().world_size;
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check_numel(
        "an output", outputs[i].numel(), inputs[i].numel() * ranks);
  }
  return gather_flat(
      call, inputs, [outputs, ranks](const at::Tensor& gathered) {
        int64_t start = 0;
        for (const auto& output : outputs) {
          const int64_t numel = output.numel() / ranks;
          output.copy_(
              gathered.narrow(1, start, numel).reshape(output.sizes()));
          start += numel;
        }
      });
}

Work reduce_scatter_tensor_coalesced(Tensors& outputs,
                                     const Tensors& inputs,
                                     const ReduceScatterOptions& options) {
  Call call("reduce_scatter_tensor_coalesced", options);
  if (!call.is_member()) return Work(nullptr);
  check_one_dtype(call, inputs, "an input");
  check_outputs(call, outputs, inputs, "an output");
  call.check_reducible(inputs[0], options.op);
  const int64_t ranks = call.group().world_size;
  const at::NoGradGuard no_grad;
  Tensors rows;  // one per rank of each input
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check_numel("an input", inputs[i].numel(), outputs[i].numel() * ranks);
    rows.push_back(inputs[i].reshape({ranks, outputs[i].numel()}));
  }
  auto from = at::cat(rows, 1).resolve_conj().resolve_neg();
  auto to = at::empty({numel_of(outputs)}, from.options());
  auto opts = call.c10d_options<c10d::ReduceScatterOptions>();
  opts.reduceOp = distributed::to_c10d(options.op);
  return call.run(
      [&] { return call.backend()._reduce_scatter_base(to, from, opts); },
      [=, keep = from] { unflatten(to, outputs); });
}

}  // namespace lockstep
