#include "lockstep/distributed/collectives.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/kernels/reduce.h"
#include "comm/splits.h"
#include "core/clock.h"
#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "lockstep/core/error.h"

namespace lockstep {

/// An operation under way. A null pointer in its place is a finished one.
struct Work::Impl {
  std::shared_ptr<distributed::Group> group;
  const char* operation;
  c10::intrusive_ptr<c10d::Work> work;
  std::mutex mutex;
  std::function<void()> finish;  ///< runs once, after success

  void wait(std::optional<std::chrono::milliseconds> timeout) {
    if (timeout && timeout->count() <= 0) {
      if (!work->isCompleted()) {
        throw TimeoutError("not finished; it goes on",
                           group->context(operation));
      }
      timeout.reset();
    }
    try {
      work->wait(std::min(timeout.value_or(kNoTimeout), kLongestWait));
      const std::lock_guard lock(mutex);
      if (auto once = std::exchange(finish, nullptr)) once();
    } catch (...) {
      if (work->isCompleted() && !work->isSuccess()) group->note_failure();
      distributed::rethrow_converted(group->context(operation));
    }
  }
};

void Work::wait(std::optional<std::chrono::milliseconds> timeout) const {
  if (impl_) impl_->wait(timeout);
}

bool Work::is_completed() const {
  return !impl_ || impl_->work->isCompleted();
}

namespace {

using distributed::Group;
using Tensors = std::vector<at::Tensor>;

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  static_assert(static_cast<int>(ReduceOp::SUM) == c10d::ReduceOp::SUM &&
                static_cast<int>(ReduceOp::AVG) == c10d::ReduceOp::AVG &&
                static_cast<int>(ReduceOp::PRODUCT) ==
                    c10d::ReduceOp::PRODUCT &&
                static_cast<int>(ReduceOp::MIN) == c10d::ReduceOp::MIN &&
                static_cast<int>(ReduceOp::MAX) == c10d::ReduceOp::MAX);
  return static_cast<c10d::ReduceOp::RedOpType>(op);
}

/// One call of one collective: checks arguments and runs the operation.
class Call {
 public:
  Call(const char* operation, bool async_op)
      : group_(distributed::require_default_group(operation)),
        operation_(operation),
        async_op_(async_op) {}

  [[nodiscard]] const Group& group() const { return *group_; }
  [[nodiscard]] c10d::Backend& backend() const { return *group_->backend; }

  template <class E = InvalidArgument>
  [[noreturn]] void fail(const std::string& message) const {
    throw E(message, group_->context(operation_));
  }

  void check_tensor(const at::Tensor& tensor, const char* name) const {
    if (!tensor.defined()) fail(std::string(name) + " is undefined");
    if (!tensor.is_cpu()) {
      fail(std::string(name) + " is on " + tensor.device().str() +
           ", but backend " + group_->backend_name +
           " serves the CPU; move it there with .cpu()");
    }
    if (tensor.layout() != at::kStrided) {
      fail(std::string(name) + " is sparse; make it dense with .to_dense()");
    }
  }

  /// A tensor that the operation writes to.
  void check_output(const at::Tensor& tensor, const char* name) const {
    check_tensor(tensor, name);
    if (!tensor.is_contiguous() &&
        at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      fail(std::string(name) +
           " has elements that share memory (expanded?); pass a .clone()");
    }
  }

  void check_reducible(const at::Tensor& tensor, ReduceOp op) const {
    const auto type = tensor.scalar_type();
    if (comm::kernels::can_reduce(op, type)) return;
    fail<Unsupported>(std::string("tensors of dtype ") + c10::toString(type) +
                      (type == at::kBool
                           ? " are reduced by MIN (and) and MAX (or) alone"
                           : " cannot be reduced; convert to a floating or "
                             "integer dtype first"));
  }

  void check_same_dtype(const at::Tensor& output,
                        const at::Tensor& input) const {
    if (output.scalar_type() != input.scalar_type()) {
      fail(std::string("output has dtype ") +
           c10::toString(output.scalar_type()) + ", input " +
           c10::toString(input.scalar_type()) + "; they must be the same");
    }
  }

  void check_one_dtype(const at::Tensor& a, const at::Tensor& b) const {
    if (a.scalar_type() != b.scalar_type()) {
      fail(std::string("the tensors have the dtypes ") +
           c10::toString(a.scalar_type()) + " and " +
           c10::toString(b.scalar_type()) + "; they must be the same");
    }
  }

  /// Two tensors of which one is written while the other is sent.
  void check_apart(const at::Tensor& output, const at::Tensor& input) const {
    const auto status = at::get_overlap_status(output, input);
    if (status == at::MemOverlapStatus::Full ||
        status == at::MemOverlapStatus::Partial) {
      fail("an output shares memory with what is sent; pass a .clone()");
    }
  }

  void check_rank(const char* name, int rank) const {
    if (rank < 0 || rank >= group_->world_size) {
      fail(std::string(name) + " is " + std::to_string(rank) +
           "; ranks are 0 to " + std::to_string(group_->world_size - 1));
    }
  }

  /// Only the root has a list.
  void check_list_at_root(bool is_root,
                          const Tensors& list,
                          const char* name,
                          const at::Tensor& tensor) const {
    if (is_root) return check_list(list, name, tensor);
    if (!list.empty()) {
      fail(std::string(name) +
           " is for the root alone; leave it out on the other ranks");
    }
  }

  void check_splits(const char* name,
                    const std::vector<int64_t>& splits,
                    const at::Tensor& tensor) const {
    const auto wrong =
        comm::wrong_splits(name, splits, tensor, group_->world_size);
    if (wrong) fail(*wrong);
  }

  void check_numel(const char* name, int64_t actual, int64_t expected) const {
    if (actual != expected) {
      fail(std::string(name) + " has " + std::to_string(actual) +
           " elements; " + std::to_string(expected) + " are needed (" +
           std::to_string(group_->world_size) + " ranks)");
    }
  }

  /// One tensor per rank.
  void check_count(const Tensors& list, const char* name) const {
    if (static_cast<int>(list.size()) != group_->world_size) {
      fail(std::string(name) + " holds " + std::to_string(list.size()) +
           " tensors; one per rank is needed, " +
           std::to_string(group_->world_size));
    }
  }

  /// One tensor per rank, each like `tensor`.
  void check_list(const Tensors& list,
                  const char* name,
                  const at::Tensor& tensor) const {
    check_count(list, name);
    for (size_t i = 0; i < list.size(); ++i) {
      const auto item = std::string(name) + '[' + std::to_string(i) + ']';
      check_tensor(list[i], item.c_str());
      check_same_dtype(list[i], tensor);
      if (list[i].sizes() != tensor.sizes()) {
        fail(item + " has shape " + c10::str(list[i].sizes()) +
             ", the other tensor " + c10::str(tensor.sizes()) +
             "; they must be the same");
      }
    }
  }

  /// `start()` begins the operation and returns its c10d::Work; `finish()` runs
  /// after it succeeded, before `wait` returns.
  template <class Start, class Finish>
  Work run(Start&& start, Finish&& finish) {
    try {
      c10::intrusive_ptr<c10d::Work> work = start();
      if (async_op_) {
        auto impl = std::make_shared<Work::Impl>();
        impl->group = group_;
        impl->operation = operation_;
        impl->work = std::move(work);
        impl->finish = std::forward<Finish>(finish);
        return Work(std::move(impl));
      }
      work->wait();
      finish();
      return Work(nullptr);
    } catch (...) {
      group_->note_failure();
      distributed::rethrow_converted(group_->context(operation_));
    }
  }

 private:
  std::shared_ptr<Group> group_;
  const char* operation_;
  bool async_op_;
};

/// `finish` of an operation whose outputs were replaced by contiguous copies.
/// Holds all tensors until then.
struct CopyBack {
  Tensors from;
  Tensors to;

  void operator()() const {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) {
      if (!from[i].is_same(to[i])) to[i].copy_(from[i].view_as(to[i]));
    }
  }
};

/// The tensor itself where its memory holds its values in order, else a copy.
at::Tensor contiguous(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    return tensor;
  }
  return tensor.resolve_conj().resolve_neg().contiguous();
}

Tensors contiguous(const Tensors& tensors) {
  Tensors result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(contiguous(tensor));
  return result;
}

}  // namespace

Work all_reduce(at::Tensor& tensor, const AllReduceOptions& options) {
  Call call("all_reduce", options.async_op);
  call.check_output(tensor, "tensor");
  call.check_reducible(tensor, options.op);
  c10d::AllreduceOptions opts;
  opts.reduceOp = to_c10d(options.op);
  opts.asyncOp = options.async_op;
  Tensors tensors = {contiguous(tensor)};
  return call.run([&] { return call.backend().allreduce(tensors, opts); },
                  CopyBack{tensors, {tensor}});
}

Work broadcast(at::Tensor& tensor, const BroadcastOptions& options) {
  Call call("broadcast", options.async_op);
  call.check_output(tensor, "tensor");
  call.check_rank("src", options.src);
  c10d::BroadcastOptions opts;
  opts.rootRank = options.src;
  opts.asyncOp = options.async_op;
  Tensors tensors = {contiguous(tensor)};
  return call.run([&] { return call.backend().broadcast(tensors, opts); },
                  CopyBack{tensors, {tensor}});
}

Work all_gather(std::vector<at::Tensor>& outputs,
                const at::Tensor& input,
                const AllGatherOptions& options) {
  Call call("all_gather", options.async_op);
  call.check_tensor(input, "input");
  call.check_list(outputs, "outputs", input);
  for (const auto& output : outputs) call.check_output(output, "output");
  c10d::AllgatherOptions opts;
  opts.asyncOp = options.async_op;
  std::vector<Tensors> lists = {contiguous(outputs)};
  Tensors inputs = {contiguous(input)};
  return call.run([&] { return call.backend().allgather(lists, inputs, opts); },
                  CopyBack{lists[0], outputs});
}

Work all_gather_into_tensor(at::Tensor& output,
                            const at::Tensor& input,
                            const AllGatherOptions& options) {
  Call call("all_gather_into_tensor", options.async_op);
  call.check_tensor(input, "input");
  call.check_output(output, "output");
  call.check_same_dtype(output, input);
  call.check_numel(
      "output", output.numel(), input.numel() * call.group().world_size);
  c10d::AllgatherOptions opts;
  opts.asyncOp = options.async_op;
  at::Tensor to = contiguous(output);
  at::Tensor from = contiguous(input);
  return call.run(
      [&] { return call.backend()._allgather_base(to, from, opts); },
      CopyBack{{to}, {output}});
}

Work reduce_scatter(at::Tensor& output,
                    const std::vector<at::Tensor>& inputs,
                    const ReduceScatterOptions& options) {
  Call call("reduce_scatter", options.async_op);
  call.check_output(output, "output");
  call.check_list(inputs, "inputs", output);
  call.check_reducible(output, options.op);
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = to_c10d(options.op);
  opts.asyncOp = options.async_op;
  Tensors outputs = {contiguous(output)};
  std::vector<Tensors> lists = {contiguous(inputs)};
  return call.run(
      [&] { return call.backend().reduce_scatter(outputs, lists, opts); },
      CopyBack{outputs, {output}});
}

Work reduce_scatter_tensor(at::Tensor& output,
                           const at::Tensor& input,
                           const ReduceScatterOptions& options) {
  Call call("reduce_scatter_tensor", options.async_op);
  call.check_tensor(input, "input");
  call.check_output(output, "output");
  call.check_reducible(output, options.op);
  call.check_same_dtype(output, input);
  call.check_numel(
      "input", input.numel(), output.numel() * call.group().world_size);
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = to_c10d(options.op);
  opts.asyncOp = options.async_op;
  at::Tensor to = contiguous(output);
  at::Tensor from = contiguous(input);
  return call.run(
      [&] { return call.backend()._reduce_scatter_base(to, from, opts); },
      CopyBack{{to}, {output}});
}

Work reduce(at::Tensor& tensor, const ReduceOptions& options) {
  Call call("reduce", options.async_op);
  const bool is_root = call.group().rank == options.dst;
  if (is_root) {
    call.check_output(tensor, "tensor");
  } else {
    call.check_tensor(tensor, "tensor");
  }
  call.check_reducible(tensor, options.op);
  call.check_rank("dst", options.dst);
  c10d::ReduceOptions opts;
  opts.reduceOp = to_c10d(options.op);
  opts.rootRank = options.dst;
  opts.asyncOp = options.async_op;
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
  Call call("gather", options.async_op);
  const bool is_root = call.group().rank == options.dst;
  call.check_tensor(tensor, "tensor");
  call.check_rank("dst", options.dst);
  call.check_list_at_root(is_root, gather_list, "gather_list", tensor);
  for (const auto& output : gather_list) call.check_output(output, "output");
  c10d::GatherOptions opts;
  opts.rootRank = options.dst;
  opts.asyncOp = options.async_op;
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
  Call call("scatter", options.async_op);
  const bool is_root = call.group().rank == options.src;
  call.check_output(tensor, "tensor");
  call.check_rank("src", options.src);
  call.check_list_at_root(is_root, scatter_list, "scatter_list", tensor);
  for (size_t r = 0; r < scatter_list.size(); ++r) {
    if (static_cast<int>(r) != options.src) {
      call.check_apart(tensor, scatter_list[r]);
    }
  }
  c10d::ScatterOptions opts;
  opts.rootRank = options.src;
  opts.asyncOp = options.async_op;
  std::vector<Tensors> lists;
  if (is_root) lists.push_back(contiguous(scatter_list));
  Tensors outputs = {contiguous(tensor)};
  return call.run([&] { return call.backend().scatter(outputs, lists, opts); },
                  CopyBack{outputs, {tensor}});
}

Work all_to_all(std::vector<at::Tensor>& output_tensor_list,
                const std::vector<at::Tensor>& input_tensor_list,
                const AllToAllOptions& options) {
  Call call("all_to_all", options.async_op);
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
  c10d::AllToAllOptions opts;
  opts.asyncOp = options.async_op;
  Tensors to = contiguous(output_tensor_list);
  Tensors from = contiguous(input_tensor_list);
  return call.run([&] { return call.backend().alltoall(to, from, opts); },
                  CopyBack{to, output_tensor_list});
}

Work all_to_all_single(at::Tensor& output,
                       const at::Tensor& input,
                       const AllToAllSingleOptions& options) {
  Call call("all_to_all_single", options.async_op);
  call.check_tensor(input, "input");
  call.check_output(output, "output");
  call.check_same_dtype(output, input);
  call.check_apart(output, input);
  call.check_splits("output_split_sizes", options.output_split_sizes, output);
  call.check_splits("input_split_sizes", options.input_split_sizes, input);
  c10d::AllToAllOptions opts;
  opts.asyncOp = options.async_op;
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
  Call call("barrier", options.async_op);
  c10d::BarrierOptions opts;
  opts.asyncOp = options.async_op;
  opts.device = at::Device(at::kCPU);
  return call.run([&] { return call.backend().barrier(opts); }, [] {});
}

}  // namespace lockstep
