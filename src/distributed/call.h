#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "distributed/work.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"

namespace lockstep::distributed {

using Tensors = std::vector<at::Tensor>;

/// One call of one operation on a group: finds the group, checks arguments and
/// runs the operation. Checks throw InvalidArgument.
class Call {
 public:
  /// Logs a warning where this rank is no member: then nothing but `is_member`
  /// may be called.
  Call(const char* operation,
       const ProcessGroup& group,
       std::optional<std::chrono::milliseconds> timeout,
       bool async_op);
  /// From the options of a collective.
  template <class Options>
  Call(const char* operation, const Options& options)
      : Call(operation, options.group, options.timeout, options.async_op) {}

  [[nodiscard]] bool is_member() const { return group_->is_member(); }
  [[nodiscard]] const Group& group() const { return *group_; }
  [[nodiscard]] const std::shared_ptr<Group>& shared_group() const {
    return group_;
  }
  [[nodiscard]] c10d::Backend& backend() const { return *group_->backend; }
  [[nodiscard]] bool is_async() const { return async_op_; }
  /// c10d's "unset" where none was given.
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }

  /// Options for c10d with what all of them have in common.
  template <class Options>
  [[nodiscard]] Options c10d_options() const {
    Options options;
    options.asyncOp = async_op_;
    options.timeout = timeout_;
    return options;
  }

  template <class E = InvalidArgument>
  [[noreturn]] void fail(const std::string& message) const {
    throw E(message, group_->context(operation_));
  }

  /// The rank in the group of a peer or root, given by its global rank under
  /// the name `name` or by its rank in the group under "group_" + `name`. At
  /// most one is given; neither: global rank 0.
  [[nodiscard]] int group_rank(const char* name,
                               std::optional<int> global_rank,
                               std::optional<int> group_rank) const;

  void check_tensor(const at::Tensor& tensor, const char* name) const;
  /// A tensor that the operation writes to.
  void check_output(const at::Tensor& tensor, const char* name) const;
  void check_reducible(const at::Tensor& tensor, ReduceOp op) const;
  void check_same_dtype(const at::Tensor& output,
                        const at::Tensor& input) const;
  void check_one_dtype(const at::Tensor& a, const at::Tensor& b) const;
  /// Two tensors of which one is written while the other is sent.
  void check_apart(const at::Tensor& output, const at::Tensor& input) const;
  /// Only the root has a list.
  void check_list_at_root(bool is_root,
                          const Tensors& list,
                          const char* name,
                          const at::Tensor& tensor) const;
  void check_splits(const char* name,
                    const std::vector<int64_t>& splits,
                    const at::Tensor& tensor) const;
  void check_numel(const char* name, int64_t actual, int64_t expected) const;
  /// One tensor per rank.
  void check_count(const Tensors& list, const char* name) const;
  /// One tensor per rank, each like `tensor`.
  void check_list(const Tensors& list,
                  const char* name,
                  const at::Tensor& tensor) const;

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
      rethrow_converted(group_->context(operation_));
    }
  }

 private:
  std::shared_ptr<Group> group_;
  const char* operation_;
  bool async_op_;
  std::chrono::milliseconds timeout_;  ///< c10d's "unset": the group's
};

/// `finish` of an operation whose outputs were replaced by contiguous copies.
/// Holds all tensors until then.
struct CopyBack {
  Tensors from;
  Tensors to;

  void operator()() const;
};

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op);

/// The tensor itself where its memory holds its values in order, else a copy.
at::Tensor contiguous(const at::Tensor& tensor);
Tensors contiguous(const Tensors& tensors);

}  // namespace lockstep::distributed
