#include "comm/backends/shm/shm_backend.h"

#include <atomic>
#include <optional>
#include <string>

#include "comm/backends/shm/algorithms.h"
#include "comm/backends/shm/channel.h"
#include "comm/backends/shm/p2p/messenger.h"
#include "comm/backends/shm/sequencer.h"
#include "comm/backends/shm/shm_work.h"
#include "comm/fingerprint.h"
#include "comm/first_failure.h"
#include "comm/kernels/reduce.h"
#include "comm/liveness.h"
#include "comm/p2p/message_backend.h"
#include "comm/splits.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::shm {
namespace {

using c10d::OpType;
using Tensors = ShmWork::Tensors;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

char* data_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

template <class Pointer>
std::vector<Pointer> data_of_each(const Tensors& tensors) {
  std::vector<Pointer> result;
  for (const auto& tensor : tensors) result.push_back(data_of(tensor));
  return result;
}

/// The ranks' stretches of one tensor.
template <class Pointer>
std::vector<Pointer> stretches(const at::Tensor& tensor, int ranks) {
  const auto n = static_cast<size_t>(ranks);
  std::vector<Pointer> result;
  for (size_t r = 0; r < n; ++r) {
    result.push_back(data_of(tensor) + r * (tensor.nbytes() / n));
  }
  return result;
}

class ShmBackend final : public p2p::MessageBackend {
 public:
  explicit ShmBackend(const BackendContext& context)
      : MessageBackend(context.rank, context.world_size),
        group_(context.group_name),
        timeout_(context.timeout),
        failure_(std::make_shared<FirstFailure>()),
        messenger_(
            std::make_shared<RingMessenger>(context.liveness,
                                            context.group_name,
                                            context.created_by.remaining(),
                                            failure_)),
        channel_(context.liveness,
                 context.group_name,
                 context.created_by.remaining()) {}

  ~ShmBackend() override {
    messenger_->finish();
    sequencer_.finish();
  }

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("shm", timeout_.load());
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_.store(timeout);
  }

  /// Returns when everything that was called has ended, but for receives that
  /// no message has come for: those it ends.
  void shutdown() override {
    closed_.store(true);
    messenger_->finish();
    sequencer_.finish();
  }

  /// Ends sends and receives with BackendError.
  void abort() override { messenger_->abort(); }

  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& opts) override {
    constexpr auto kOperation = Operation::kAllReduce;
    const ReduceOp op = reduce_op(kOperation, opts.reduceOp);
    for (const auto& tensor : tensors) check(kOperation, tensor, op);
    return submit(kOperation,
                  OpType::ALLREDUCE,
                  opts.asyncOp,
                  tensors,
                  {},
                  [=, this, timeout = timeout_of(opts)](const Tensors& data,
                                                        const Tensors&) {
                    for (const auto& tensor : data) {
                      all_reduce(channel_,
                                 {fingerprint(kOperation, tensor, op), timeout},
                                 data_of(tensor));
                    }
                  });
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }

  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& opts) override {
    constexpr auto kOperation = Operation::kBroadcast;
    for (const auto& tensor : tensors) check(kOperation, tensor);
    check_root(kOperation, opts.rootRank);
    return submit(
        kOperation,
        OpType::BROADCAST,
        opts.asyncOp,
        tensors,
        {},
        [this,
         root = static_cast<uint32_t>(opts.rootRank),
         timeout = timeout_of(opts)](const Tensors& data, const Tensors&) {
          for (const auto& tensor : data) {
            Call call{fingerprint(kOperation, tensor), timeout};
            call.fingerprint.root = root;
            shm::broadcast(channel_, call, data_of(tensor));
          }
        });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs,
                    Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    constexpr auto kOperation = Operation::kAllGather;
    check_one(kOperation, "input", inputs.size());
    check_one(kOperation, "list of outputs", outputs.size());
    check(kOperation, inputs[0]);
    check_list(kOperation, "output", outputs[0], inputs[0]);
    return submit(kOperation,
                  OpType::ALLGATHER,
                  opts.asyncOp,
                  outputs[0],
                  inputs,
                  [this, timeout = timeout_of(opts)](const Tensors& to,
                                                     const Tensors& from) {
                    all_gather(channel_,
                               {fingerprint(kOperation, from[0]), timeout},
                               data_of(from[0]),
                               data_of_each<char*>(to));
                  });
  }

  WorkPtr _allgather_base(at::Tensor& output,
                          at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return gather_into(OpType::_ALLGATHER_BASE, {output}, {input}, opts);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override {
    return gather_into(OpType::COALESCED, outputs, inputs, opts);
  }

  WorkPtr reduce_scatter(Tensors& outputs,
                         std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    constexpr auto kOperation = Operation::kReduceScatter;
    const ReduceOp op = reduce_op(kOperation, opts.reduceOp);
    check_one(kOperation, "output", outputs.size());
    check_one(kOperation, "list of inputs", inputs.size());
    check(kOperation, outputs[0], op);
    check_list(kOperation, "input", inputs[0], outputs[0]);
    return submit(kOperation,
                  OpType::REDUCE_SCATTER,
                  opts.asyncOp,
                  outputs,
                  inputs[0],
                  [=, this, timeout = timeout_of(opts)](const Tensors& to,
                                                        const Tensors& from) {
                    shm::reduce_scatter(
                        channel_,
                        {fingerprint(kOperation, to[0], op), timeout},
                        data_of_each<const char*>(from),
                        data_of(to[0]));
                  });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts) override {
    return scatter_from(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, opts);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    return scatter_from(
        OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, inputs, opts);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    constexpr auto kOperation = Operation::kReduce;
    const ReduceOp op = reduce_op(kOperation, opts.reduceOp);
    check_one(kOperation, "tensor", tensors.size());
    check(kOperation, tensors[0], op);
    check_root(kOperation, opts.rootRank);
    return submit(kOperation,
                  OpType::REDUCE,
                  opts.asyncOp,
                  tensors,
                  {},
                  [=, this, root = opts.rootRank, timeout = timeout_of(opts)](
                      const Tensors& data, const Tensors&) {
                    Call call{fingerprint(kOperation, data[0], op), timeout};
                    call.fingerprint.root = static_cast<uint32_t>(root);
                    shm::reduce(channel_, call, data_of(data[0]));
                  });
  }

  WorkPtr gather(std::vector<Tensors>& outputs,
                 Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    constexpr auto kOperation = Operation::kGather;
    check_one(kOperation, "input", inputs.size());
    check(kOperation, inputs[0]);
    check_root(kOperation, opts.rootRank);
    Tensors list;
    if (opts.rootRank == rank_) {
      check_one(kOperation, "list of outputs", outputs.size());
      check_list(kOperation, "output", outputs[0], inputs[0]);
      list = outputs[0];
    }
    return submit(
        kOperation,
        OpType::GATHER,
        opts.asyncOp,
        list,
        inputs,
        [this, root = opts.rootRank, timeout = timeout_of(opts)](
            const Tensors& to, const Tensors& from) {
          Call call{fingerprint(kOperation, from[0]), timeout};
          call.fingerprint.root = static_cast<uint32_t>(root);
          shm::gather(
              channel_, call, data_of(from[0]), data_of_each<char*>(to));
        });
  }

  WorkPtr scatter(Tensors& outputs,
                  std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    constexpr auto kOperation = Operation::kScatter;
    check_one(kOperation, "output", outputs.size());
    check(kOperation, outputs[0]);
    check_root(kOperation, opts.rootRank);
    Tensors list;
    if (opts.rootRank == rank_) {
      check_one(kOperation, "list of inputs", inputs.size());
      check_list(kOperation, "input", inputs[0], outputs[0]);
      list = inputs[0];
    }
    return submit(
        kOperation,
        OpType::SCATTER,
        opts.asyncOp,
        outputs,
        list,
        [this, root = opts.rootRank, timeout = timeout_of(opts)](
            const Tensors& to, const Tensors& from) {
          Call call{fingerprint(kOperation, to[0]), timeout};
          call.fingerprint.root = static_cast<uint32_t>(root);
          shm::scatter(
              channel_, call, data_of_each<char*>(from), data_of(to[0]));
        });
  }

  WorkPtr alltoall_base(at::Tensor& output,
                        at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    constexpr auto kOperation = Operation::kAllToAll;
    check(kOperation, output);
    check(kOperation, input);
    check_same_dtype(kOperation, output, input);
    check_splits(kOperation, "output_split_sizes", output_splits, output);
    check_splits(kOperation, "input_split_sizes", input_splits, input);
    return submit(
        kOperation,
        OpType::ALLTOALL_BASE,
        opts.asyncOp,
        {output},
        {input},
        [=, this, timeout = timeout_of(opts)](const Tensors& to,
                                              const Tensors& from) {
          all_to_all(
              channel_,
              {fingerprint_of_all_to_all(from[0].scalar_type()), timeout},
              cut(from[0], input_splits, size_),
              cut(to[0], output_splits, size_));
        });
  }

  WorkPtr alltoall(Tensors& outputs,
                   Tensors& inputs,
                   const c10d::AllToAllOptions& opts) override {
    constexpr auto kOperation = Operation::kAllToAll;
    for (const auto* list : {&outputs, &inputs}) {
      if (list->size() != static_cast<size_t>(size_)) {
        fail(kOperation,
             std::to_string(list->size()) +
                 " tensors are in a list; one for each of " +
                 std::to_string(size_) + " ranks is needed");
      }
      for (const auto& tensor : *list) {
        check(kOperation, tensor);
        check_same_dtype(kOperation, tensor, inputs[0]);
      }
    }
    return submit(
        kOperation,
        OpType::ALLTOALL,
        opts.asyncOp,
        outputs,
        inputs,
        [this, timeout = timeout_of(opts)](const Tensors& to,
                                           const Tensors& from) {
          all_to_all(
              channel_,
              {fingerprint_of_all_to_all(from[0].scalar_type()), timeout},
              stretches_of_each(from),
              stretches_of_each(to));
        });
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return submit(
        Operation::kBarrier,
        OpType::BARRIER,
        opts.asyncOp,
        {},
        {},
        [this, timeout = timeout_of(opts)](const Tensors&, const Tensors&) {
          channel_.begin({.operation = Operation::kBarrier}, timeout);
        });
  }

 protected:
  [[nodiscard]] ErrorContext error_context(
      const char* operation) const override {
    ErrorContext result = channel_.liveness().error_context();
    result.operation = operation;
    result.group = group_;
    result.backend = "shm";
    return result;
  }
  [[nodiscard]] std::chrono::milliseconds group_timeout() const override {
    return timeout_.load();
  }
  std::shared_ptr<p2p::Messenger> messenger(
      const ErrorContext& context) override {
    if (failure_->happened()) failure_->refuse(context);
    return messenger_;
  }

 private:
  WorkPtr gather_into(OpType type,
                      const Tensors& outputs,
                      const Tensors& inputs,
                      const c10d::AllgatherOptions& opts) {
    constexpr auto kOperation = Operation::kAllGather;
    check_pairs(kOperation, outputs, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_whole(kOperation, "output", outputs[i], inputs[i]);
    }
    return submit(kOperation,
                  type,
                  opts.asyncOp,
                  outputs,
                  inputs,
                  [this, timeout = timeout_of(opts)](const Tensors& to,
                                                     const Tensors& from) {
                    for (size_t i = 0; i < from.size(); ++i) {
                      all_gather(channel_,
                                 {fingerprint(kOperation, from[i]), timeout},
                                 data_of(from[i]),
                                 stretches<char*>(to[i], size_));
                    }
                  });
  }

  WorkPtr scatter_from(OpType type,
                       const Tensors& outputs,
                       const Tensors& inputs,
                       const c10d::ReduceScatterOptions& opts) {
    constexpr auto kOperation = Operation::kReduceScatter;
    const ReduceOp op = reduce_op(kOperation, opts.reduceOp);
    check_pairs(kOperation, outputs, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      check(kOperation, outputs[i], op);
      check_whole(kOperation, "input", inputs[i], outputs[i]);
    }
    return submit(kOperation,
                  type,
                  opts.asyncOp,
                  outputs,
                  inputs,
                  [=, this, timeout = timeout_of(opts)](const Tensors& to,
                                                        const Tensors& from) {
                    for (size_t i = 0; i < to.size(); ++i) {
                      shm::reduce_scatter(
                          channel_,
                          {fingerprint(kOperation, to[i], op), timeout},
                          stretches<const char*>(from[i], size_),
                          data_of(to[i]));
                    }
                  });
  }

  /// Runs `body(outputs, inputs)` now or queues it. Throws what a synchronous
  /// operation throws.
  template <class Body>
  WorkPtr submit(Operation operation,
                 OpType type,
                 bool async,
                 Tensors outputs,
                 Tensors inputs,
                 Body body) {
    if (closed_.load(std::memory_order_relaxed)) {
      fail(operation, "the group was destroyed; call init_process_group again");
    }
    auto work = c10::make_intrusive<ShmWork>(
        context(operation), type, std::move(outputs), std::move(inputs));
    auto guarded = [this,
                    operation,
                    was_failed = failure_->happened(),
                    body = std::move(body)](const Tensors& to,
                                            const Tensors& from) {
      // What was queued before the failure shares its error.
      if (was_failed) failure_->refuse(context(operation));
      if (failure_->happened()) std::rethrow_exception(failure_->error());
      try {
        body(to, from);
      } catch (...) {
        failure_->note(std::current_exception());
        throw;
      }
    };
    if (!async && sequencer_.try_enter()) {
      work->run(guarded);
      sequencer_.leave();
    } else {
      sequencer_.queue(
          [work, guarded = std::move(guarded)] { work->run(guarded); });
    }
    if (!async) work->wait(kNoTimeout);
    return work;
  }

  template <class Opts>
  [[nodiscard]] std::chrono::milliseconds timeout_of(const Opts& opts) const {
    return opts.timeout > kNoTimeout ? opts.timeout : timeout_.load();
  }

  [[nodiscard]] ErrorContext context(Operation operation) const {
    return error_context(name(operation));
  }

  template <class E = InvalidArgument>
  [[noreturn]] void fail(Operation operation,
                         const std::string& message) const {
    throw E(message, context(operation));
  }

  [[nodiscard]] ReduceOp reduce_op(Operation operation,
                                   const c10d::ReduceOp& op) const {
    if (op.op_ > c10d::ReduceOp::MAX) {
      fail<Unsupported>(operation,
                        "the reduce operation is none of SUM, AVG, PRODUCT, "
                        "MIN and MAX");
    }
    return static_cast<ReduceOp>(op.op_);
  }

  void check(Operation operation, const at::Tensor& tensor) const {
    if (!tensor.defined()) fail(operation, "a tensor is undefined");
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided) {
      fail(operation,
           "a tensor is on " + tensor.device().str() + " with layout " +
               c10::str(tensor.layout()) +
               "; the backend shm serves dense tensors of the CPU");
    }
    if (!tensor.is_contiguous()) {
      fail(operation, "a tensor is not contiguous; call .contiguous()");
    }
  }

  void check(Operation operation, const at::Tensor& tensor, ReduceOp op) const {
    check(operation, tensor);
    if (!kernels::can_reduce(op, tensor.scalar_type())) {
      fail<Unsupported>(
          operation,
          std::string("tensors of ") + c10::toString(tensor.scalar_type()) +
              " cannot be reduced with this operation" +
              (tensor.scalar_type() == at::kBool ? "; bool has MIN and MAX"
                                                 : ""));
    }
  }

  void check_root(Operation operation, int64_t root) const {
    if (root < 0 || root >= size_) {
      fail(operation,
           "the root is " + std::to_string(root) + "; ranks are 0 to " +
               std::to_string(size_ - 1));
    }
  }

  void check_same_dtype(Operation operation,
                        const at::Tensor& a,
                        const at::Tensor& b) const {
    if (a.scalar_type() != b.scalar_type()) {
      fail(operation,
           std::string("the tensors are ") + c10::toString(a.scalar_type()) +
               " and " + c10::toString(b.scalar_type()) +
               "; they must be the same");
    }
  }

  void check_splits(Operation operation,
                    const char* name,
                    const std::vector<int64_t>& splits,
                    const at::Tensor& tensor) const {
    const auto wrong = wrong_splits(name, splits, tensor, size_);
    if (wrong) fail(operation, *wrong);
  }

  void check_one(Operation operation, const char* what, size_t count) const {
    if (count != 1) {
      fail(operation,
           "one " + std::string(what) + " is needed, not " +
               std::to_string(count));
    }
  }

  void check_pairs(Operation operation,
                   const Tensors& outputs,
                   const Tensors& inputs) const {
    if (outputs.size() != inputs.size()) {
      fail(operation,
           std::to_string(outputs.size()) + " outputs for " +
               std::to_string(inputs.size()) + " inputs");
    }
    for (const auto& tensor : outputs) check(operation, tensor);
    for (const auto& tensor : inputs) check(operation, tensor);
  }

  /// `whole` holds one stretch like `own` for every rank.
  void check_whole(Operation operation,
                   const char* what,
                   const at::Tensor& whole,
                   const at::Tensor& own) const {
    if (whole.scalar_type() != own.scalar_type() ||
        whole.numel() != own.numel() * size_) {
      fail(operation,
           std::string("the ") + what + " is " +
               c10::toString(whole.scalar_type()) + " with " +
               std::to_string(whole.numel()) + " elements; needed are " +
               c10::toString(own.scalar_type()) + " with " +
               std::to_string(own.numel() * size_) + " for " +
               std::to_string(size_) + " ranks");
    }
  }

  /// `list` holds one tensor like `own` for every rank.
  void check_list(Operation operation,
                  const char* what,
                  const Tensors& list,
                  const at::Tensor& own) const {
    if (list.size() != static_cast<size_t>(size_)) {
      fail(operation,
           std::to_string(list.size()) + " tensors are in the list of " + what +
               "s; one for each of " + std::to_string(size_) +
               " ranks is needed");
    }
    for (const auto& tensor : list) {
      check(operation, tensor);
      if (tensor.scalar_type() != own.scalar_type() ||
          tensor.numel() != own.numel()) {
        fail(operation,
             std::string("an ") + what + " is " +
                 c10::toString(tensor.scalar_type()) + " with " +
                 std::to_string(tensor.numel()) + " elements, the other side " +
                 c10::toString(own.scalar_type()) + " with " +
                 std::to_string(own.numel()));
      }
    }
  }

  const std::string group_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> closed_{false};
  const std::shared_ptr<FirstFailure> failure_;
  const std::shared_ptr<RingMessenger> messenger_;
  Channel channel_;  ///< of the operation under way
  Sequencer sequencer_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendContext& context) {
  if (!context.liveness || !context.liveness->single_host()) {
    throw Unsupported(
        "the backend shm needs all ranks on one host; use hybrid or gloo",
        {.backend = "shm"});
  }
  if (context.world_size > Layout::kMostRanks) {
    throw Unsupported("the backend shm serves " +
                          std::to_string(Layout::kMostRanks) +
                          " ranks at most; use gloo",
                      {.backend = "shm"});
  }
  return c10::make_intrusive<ShmBackend>(context);
}

}  // namespace lockstep::comm::shm
