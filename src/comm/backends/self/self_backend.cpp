#include "comm/backends/self/self_backend.h"

#include <atomic>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/p2p/message_backend.h"
#include "comm/p2p/self_messenger.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::self {
namespace {

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(c10d::OpType type) : Work(0, type) { finish(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    return future;
  }
};

class SelfBackend final : public p2p::MessageBackend {
 public:
  SelfBackend(ErrorContext context, std::chrono::milliseconds timeout)
      : MessageBackend(0, 1),
        context_(std::move(context)),
        timeout_(timeout),
        messenger_(std::make_shared<p2p::SelfMessenger>(
            [rank = context_.rank](int) { return rank; })) {}

  ~SelfBackend() override { messenger_->finish(); }

  const std::string getBackendName() const override { return "self"; }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& /*tensors*/,
      const c10d::BroadcastOptions& /*opts*/) override {
    return done(c10d::OpType::BROADCAST);
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& /*tensors*/,
      const c10d::AllreduceOptions& /*opts*/) override {
    return done(c10d::OpType::ALLREDUCE);
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& /*opts*/) override {
    copy(outputs.at(0).at(0), inputs.at(0));
    return done(c10d::OpType::ALLGATHER);
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& /*opts*/) override {
    copy(output, input);
    return done(c10d::OpType::_ALLGATHER_BASE);
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& /*opts*/) override {
    copy(outputs.at(0), inputs.at(0).at(0));
    return done(c10d::OpType::REDUCE_SCATTER);
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& /*opts*/) override {
    copy(output, input);
    return done(c10d::OpType::_REDUCE_SCATTER_BASE);
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      std::vector<at::Tensor>& /*tensors*/,
      const c10d::ReduceOptions& /*opts*/) override {
    return done(c10d::OpType::REDUCE);
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& /*opts*/) override {
    copy(outputs.at(0).at(0), inputs.at(0));
    return done(c10d::OpType::GATHER);
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& /*opts*/) override {
    copy(outputs.at(0), inputs.at(0).at(0));
    return done(c10d::OpType::SCATTER);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& /*output_splits*/,
      std::vector<int64_t>& /*input_splits*/,
      const c10d::AllToAllOptions& /*opts*/) override {
    check_same_numel(output, input);
    copy(output, input);
    return done(c10d::OpType::ALLTOALL_BASE);
  }

  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& /*opts*/) override {
    check_same_numel(outputs.at(0), inputs.at(0));
    copy(outputs.at(0), inputs.at(0));
    return done(c10d::OpType::ALLTOALL);
  }

  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& /*opts*/) override {
    return done(c10d::OpType::BARRIER);
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_.store(timeout);
  }

  void shutdown() override {
    open_.store(false);
    messenger_->finish();
  }

 protected:
  [[nodiscard]] ErrorContext error_context(
      const char* operation) const override {
    ErrorContext context = context_;
    context.operation = operation;
    return context;
  }
  [[nodiscard]] std::chrono::milliseconds group_timeout() const override {
    return timeout_.load();
  }
  std::shared_ptr<p2p::Messenger> messenger(
      const ErrorContext& context) override {
    check_open(context);
    return messenger_;
  }

 private:
  c10::intrusive_ptr<c10d::Work> done(c10d::OpType type) const {
    check_open(error_context(c10d::opTypeToString(type).c_str()));
    return c10::make_intrusive<DoneWork>(type);
  }

  void check_open(const ErrorContext& context) const {
    if (open_.load()) return;
    throw InvalidArgument(
        "the group was destroyed; call init_process_group again", context);
  }

  static void check_same_numel(const at::Tensor& output,
                               const at::Tensor& input) {
    if (output.numel() != input.numel()) {
      throw MismatchError(
          "the rank sends itself " + std::to_string(input.numel()) +
          " elements and expects " + std::to_string(output.numel()));
    }
  }

  static void copy(at::Tensor& output, const at::Tensor& input) {
    const at::NoGradGuard no_grad;
    output.copy_(input.view_as(output));
  }

  const ErrorContext context_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> open_{true};
  const std::shared_ptr<p2p::SelfMessenger> messenger_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(ErrorContext context,
                                         std::chrono::milliseconds timeout) {
  return c10::make_intrusive<SelfBackend>(std::move(context), timeout);
}

}  // namespace lockstep::comm::self
