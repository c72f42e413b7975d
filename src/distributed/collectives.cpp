#include "lockstep/distributed/collectives.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "distributed/call.h"

namespace lockstep {
namespace {

using distributed::Call;
using distributed::contiguous;
using distributed::CopyBack;
using distributed::Tensors;
using distributed::to_c10d;

}  // namespace

Work all_reduce(at::Tensor& tensor, const AllReduceOptions& options) {
  Call call("all_reduce", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_output(tensor, "tensor");
  call.check_reducible(tensor, options.op);
  auto opts = call.c10d_options<c10d::AllreduceOptions>();
  opts.reduceOp = to_c10d(options.op);
  Tensors tensors = {contiguous(tensor)};
  return call.run([&] { return call.backend().allreduce(tensors, opts); },
                  CopyBack{tensors, {tensor}});
}

Work broadcast(at::Tensor& tensor, const BroadcastOptions& options) {
  Call call("broadcast", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_output(tensor, "tensor");
  const int root = call.group_rank("src", options.src, options.group_src);
  auto opts = call.c10d_options<c10d::BroadcastOptions>();
  opts.rootRank = root;
  Tensors tensors = {contiguous(tensor)};
  return call.run([&] { return call.backend().broadcast(tensors, opts); },
                  CopyBack{tensors, {tensor}});
}

Work all_gather(std::vector<at::Tensor>& outputs,
                const at::Tensor& input,
                const AllGatherOptions& options) {
  Call call("all_gather", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_tensor(input, "input");
  call.check_list(outputs, "outputs", input);
  for (const auto& output : outputs) call.check_output(output, "output");
  auto opts = call.c10d_options<c10d::AllgatherOptions>();
  std::vector<Tensors> lists = {contiguous(outputs)};
  Tensors inputs = {contiguous(input)};
  return call.run([&] { return call.backend().allgather(lists, inputs, opts); },
                  CopyBack{lists[0], outputs});
}

Work all_gather_into_tensor(at::Tensor& output,
                            const at::Tensor& input,
                            const AllGatherOptions& options) {
  Call call("all_gather_into_tensor", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_tensor(input, "input");
  call.check_output(output, "output");
  call.check_same_dtype(output, input);
  call.check_numel(
      "output", output.numel(), input.numel() * call.group().world_size);
  auto opts = call.c10d_options<c10d::AllgatherOptions>();
  at::Tensor to = contiguous(output);
  at::Tensor from = contiguous(input);
  return call.run(
      [&] { return call.backend()._allgather_base(to, from, opts); },
      CopyBack{{to}, {output}});
}

Work reduce_scatter(at::Tensor& output,
                    const std::vector<at::Tensor>& inputs,
                    const ReduceScatterOptions& options) {
  Call call("reduce_scatter", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_output(output, "output");
  call.check_list(inputs, "inputs", output);
  call.check_reducible(output, options.op);
  auto opts = call.c10d_options<c10d::ReduceScatterOptions>();
  opts.reduceOp = to_c10d(options.op);
  Tensors outputs = {contiguous(output)};
  std::vector<Tensors> lists = {contiguous(inputs)};
  return call.run(
      [&] { return call.backend().reduce_scatter(outputs, lists, opts); },
      CopyBack{outputs, {output}});
}

Work reduce_scatter_tensor(at::Tensor& output,
                           const at::Tensor& input,
                           const ReduceScatterOptions& options) {
  Call call("reduce_scatter_tensor", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_tensor(input, "input");
  call.check_output(output, "output");
  call.check_reducible(output, options.op);
  call.check_same_dtype(output, input);
  call.check_numel(
      "input", input.numel(), output.numel() * call.group().world_size);
  auto opts = call.c10d_options<c10d::ReduceScatterOptions>();
  opts.reduceOp = to_c10d(options.op);
  at::Tensor to = contiguous(output);
  at::Tensor from = contiguous(input);
  return call.run(
      [&] { return call.backend()._reduce_scatter_base(to, from, opts); },
      CopyBack{{to}, {output}});
}

Work reduce(at::Tensor& tensor, const ReduceOptions& options) {
  Call call("reduce", options);
  if (!call.is_member()) return Work(nullptr);
  const int root = call.group_rank("dst", options.dst, options.group_dst);
  const bool is_root = call.group().rank == root;
  if (is_root) {
    call.check_output(tensor, "tensor");
  } else {
    call.check_tensor(tensor, "tensor");
  }
  call.check_reducible(tensor, options.op);
  auto opts = call.c10d_options<c10d::ReduceOptions>();
  opts.reduceOp = to_c10d(options.op);
  opts.rootRank = root;
  Tensors tensors = {contiguous(tensor)};
  if (is_root) {
    return call.run([&] { return call.backend().reduce(tensors, opts); },
                    CopyBack{tensors, {tensor}});
  }
  // c10d's own backends, which serve interop groups, write to it.
  if (!call.group().liveness) tensors[0] = tensors[0].clone();
  return call.run([&] { return call.backend().reduce(tensors, opts); }, [] {});
}

Work gather(const at::Tensor& tensor,
            std::vector<at::Tensor>& gather_list,
            const GatherOptions& options) {
  Call call("gather", options);
  if (!call.is_member()) return Work(nullptr);
  const int root = call.group_rank("dst", options.dst, options.group_dst);
  const bool is_root = call.group().rank == root;
  call.check_tensor(tensor, "tensor");
  call.check_list_at_root(is_root, gather_list, "gather_list", tensor);
  for (const auto& output : gather_list) call.check_output(output, "output");
  auto opts = call.c10d_options<c10d::GatherOptions>();
  opts.rootRank = root;
  std::vector<Tensors> lists;
  if (is_root) lists.push_back(contiguous(gather_list));
  Tensors inputs = {contiguous(tensor)};
  return call.run([&] { return call.backend().gather(lists, inputs, opts); },
                  CopyBack{is_root ? lists[0] : Tensors(), gather_list});
}

Work gather(const at::Tensor& tensor, const GatherOptions& options) {
  Tensors none;
  return gather(tensor, none, options);
}

Work scatter(at::Tensor& tensor,
             const std::vector<at::Tensor>& scatter_list,
             const ScatterOptions& options) {
  Call call("scatter", options);
  if (!call.is_member()) return Work(nullptr);
  const int root = call.group_rank("src", options.src, options.group_src);
  const bool is_root = call.group().rank == root;
  call.check_output(tensor, "tensor");
  call.check_list_at_root(is_root, scatter_list, "scatter_list", tensor);
  for (size_t r = 0; r < scatter_list.size(); ++r) {
    if (static_cast<int>(r) != root) {
      call.check_apart(tensor, scatter_list[r]);
    }
  }
  auto opts = call.c10d_options<c10d::ScatterOptions>();
  opts.rootRank = root;
  std::vector<Tensors> lists;
  if (is_root) lists.push_back(contiguous(scatter_list));
  Tensors outputs = {contiguous(tensor)};
  return call.run([&] { return call.backend().scatter(outputs, lists, opts); },
                  CopyBack{outputs, {tensor}});
}

Work all_to_all(std::vector<at::Tensor>& output_tensor_list,
                const std::vector<at::Tensor>& input_tensor_list,
                const AllToAllOptions& options) {
  Call call("all_to_all", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_count(output_tensor_list, "output_tensor_list");
  call.check_count(input_tensor_list, "input_tensor_list");
  for (const auto& tensor : input_tensor_list) {
    call.check_tensor(tensor, "an input");
    call.check_one_dtype(input_tensor_list[0], tensor);
  }
  for (const auto& tensor : output_tensor_list) {
    call.check_output(tensor, "an output");
    call.check_one_dtype(input_tensor_list[0], tensor);
    for (const auto& input : input_tensor_list) {
      call.check_apart(tensor, input);
    }
  }
  auto opts = call.c10d_options<c10d::AllToAllOptions>();
  Tensors to = contiguous(output_tensor_list);
  Tensors from = contiguous(input_tensor_list);
  return call.run([&] { return call.backend().alltoall(to, from, opts); },
                  CopyBack{to, output_tensor_list});
}

Work all_to_all_single(at::Tensor& output,
                       const at::Tensor& input,
                       const AllToAllSingleOptions& options) {
  Call call("all_to_all_single", options);
  if (!call.is_member()) return Work(nullptr);
  call.check_tensor(input, "input");
  call.check_output(output, "output");
  call.check_same_dtype(output, input);
  call.check_apart(output, input);
  call.check_splits("output_split_sizes", options.output_split_sizes, output);
  call.check_splits("input_split_sizes", options.input_split_sizes, input);
  auto opts = call.c10d_options<c10d::AllToAllOptions>();
  at::Tensor to = contiguous(output);
  at::Tensor from = contiguous(input);
  auto output_splits = options.output_split_sizes;
  auto input_splits = options.input_split_sizes;
  return call.run(
      [&] {
        return call.backend().alltoall_base(
            to, from, output_splits, input_splits, opts);
      },
      CopyBack{{to}, {output}});
}

Work barrier(const BarrierOptions& options) {
  Call call("barrier", options);
  if (!call.is_member()) return Work(nullptr);
  auto opts = call.c10d_options<c10d::BarrierOptions>();
  opts.device = at::Device(at::kCPU);
  return call.run([&] { return call.backend().barrier(opts); }, [] {});
}

}  // namespace lockstep
