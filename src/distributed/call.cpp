#include "distributed/call.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/kernels/reduce.h"
#include "comm/splits.h"
#include "core/clock.h"
#include "lockstep/core/log.h"

namespace lockstep::distributed {

Call::Call(const char* operation,
           const ProcessGroup& group,
           std::optional<std::chrono::milliseconds> timeout,
           bool async_op)
    : group_(require_group(group, operation)),
      operation_(operation),
      async_op_(async_op),
      timeout_(std::min(timeout.value_or(c10d::kUnsetTimeout), kLongestWait)) {
  if (timeout && timeout->count() <= 0) fail("timeout must be positive");
  if (!is_member()) {
    log::warning(std::string(operation) + " on global rank " +
                 std::to_string(group_->global_rank) +
                 ", which does not belong to the given group: nothing is done");
  }
}

int Call::group_rank(const char* name,
                     std::optional<int> global_rank,
                     std::optional<int> group_rank) const {
  const std::string of_group = std::string("group_") + name;
  if (global_rank && group_rank) {
    fail(std::string("both ") + name + " and " + of_group +
         " are given; give one of them");
  }
  if (group_rank) {
    if (*group_rank < 0 || *group_rank >= group_->world_size) {
      fail(of_group + " is " + std::to_string(*group_rank) +
           "; the group's ranks are 0 to " +
           std::to_string(group_->world_size - 1));
    }
    return *group_rank;
  }
  const int global = global_rank.value_or(0);
  if (const auto found = group_->rank_of(global)) return *found;
  fail(std::string(name) + " is " + std::to_string(global) + "; the " +
       (group_->is_default()
            ? "ranks are 0 to " + std::to_string(group_->world_size - 1)
            : "group's global ranks are " + list_of(group_->ranks)));
}

void Call::check_tensor(const at::Tensor& tensor, const char* name) const {
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

void Call::check_output(const at::Tensor& tensor, const char* name) const {
  check_tensor(tensor, name);
  if (!tensor.is_contiguous() &&
      at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    fail(std::string(name) +
         " has elements that share memory (expanded?); pass a .clone()");
  }
}

void Call::check_reducible(const at::Tensor& tensor, ReduceOp op) const {
  const auto type = tensor.scalar_type();
  if (comm::kernels::can_reduce(op, type)) return;
  fail<Unsupported>(std::string("tensors of dtype ") + c10::toString(type) +
                    (type == at::kBool
                         ? " are reduced by MIN (and) and MAX (or) alone"
                         : " cannot be reduced; convert to a floating or "
                           "integer dtype first"));
}

void Call::check_same_dtype(const at::Tensor& output,
                            const at::Tensor& input) const {
  if (output.scalar_type() != input.scalar_type()) {
    fail(std::string("output has dtype ") +
         c10::toString(output.scalar_type()) + ", input " +
         c10::toString(input.scalar_type()) + "; they must be the same");
  }
}

void Call::check_one_dtype(const at::Tensor& a, const at::Tensor& b) const {
  if (a.scalar_type() != b.scalar_type()) {
    fail(std::string("the tensors have the dtypes ") +
         c10::toString(a.scalar_type()) + " and " +
         c10::toString(b.scalar_type()) + "; they must be the same");
  }
}

void Call::check_apart(const at::Tensor& output,
                       const at::Tensor& input) const {
  const auto status = at::get_overlap_status(output, input);
  if (status == at::MemOverlapStatus::Full ||
      status == at::MemOverlapStatus::Partial) {
    fail("an output shares memory with what is sent; pass a .clone()");
  }
}

void Call::check_list_at_root(bool is_root,
                              const Tensors& list,
                              const char* name,
                              const at::Tensor& tensor) const {
  if (is_root) return check_list(list, name, tensor);
  if (!list.empty()) {
    fail(std::string(name) +
         " is for the root alone; leave it out on the other ranks");
  }
}

void Call::check_splits(const char* name,
                        const std::vector<int64_t>& splits,
                        const at::Tensor& tensor) const {
  const auto wrong =
      comm::wrong_splits(name, splits, tensor, group_->world_size);
  if (wrong) fail(*wrong);
}

void Call::check_numel(const char* name,
                       int64_t actual,
                       int64_t expected) const {
  if (actual != expected) {
    fail(std::string(name) + " has " + std::to_string(actual) + " elements; " +
         std::to_string(expected) + " are needed (" +
         std::to_string(group_->world_size) + " ranks)");
  }
}

void Call::check_count(const Tensors& list, const char* name) const {
  if (static_cast<int>(list.size()) != group_->world_size) {
    fail(std::string(name) + " holds " + std::to_string(list.size()) +
         " tensors; one per rank is needed, " +
         std::to_string(group_->world_size));
  }
}

void Call::check_list(const Tensors& list,
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

void CopyBack::operator()() const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < from.size(); ++i) {
    if (!from[i].is_same(to[i])) to[i].copy_(from[i].view_as(to[i]));
  }
}

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  static_assert(static_cast<int>(ReduceOp::SUM) == c10d::ReduceOp::SUM &&
                static_cast<int>(ReduceOp::AVG) == c10d::ReduceOp::AVG &&
                static_cast<int>(ReduceOp::PRODUCT) ==
                    c10d::ReduceOp::PRODUCT &&
                static_cast<int>(ReduceOp::MIN) == c10d::ReduceOp::MIN &&
                static_cast<int>(ReduceOp::MAX) == c10d::ReduceOp::MAX);
  return static_cast<c10d::ReduceOp::RedOpType>(op);
}

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

}  // namespace lockstep::distributed
