#include "lockstep/nn/reducer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

#include "distributed/group.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "memory/policy.h"
#include "nn/buffer_sync.h"
#include "nn/model_check.h"
#include "nn/transport.h"

namespace lockstep::nn {
namespace {

using torch::autograd::Engine;

class AutogradReducer;

/// Lives as long as one backward pass: held by the engine's final callback,
/// dropped with the pass's graph task, also when the pass throws.
class Pass {
 public:
  explicit Pass(std::shared_ptr<AutogradReducer> reducer)
      : reducer_(std::move(reducer)) {}
  ~Pass();
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  void end();

 private:
  std::shared_ptr<AutogradReducer> reducer_;
};

class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::weak_ptr<AutogradReducer> reducer,
               size_t index,
               std::unique_ptr<PostAccumulateGradHook> next)
      : reducer_(std::move(reducer)), index_(index), next_(std::move(next)) {}

  void operator()(const at::Tensor& parameter) override;
  [[nodiscard]] bool alive() const { return !reducer_.expired(); }
  /// The hook that was there before.
  std::unique_ptr<PostAccumulateGradHook> take_next() {
    return std::move(next_);
  }

 private:
  std::weak_ptr<AutogradReducer> reducer_;
  size_t index_;
  std::unique_ptr<PostAccumulateGradHook> next_;
};

/// Runs before the first operation of a backward pass through the model.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::weak_ptr<AutogradReducer> reducer)
      : reducer_(std::move(reducer)) {}
  std::vector<at::Tensor> operator()(
      const std::vector<at::Tensor>& gradients) override;

 private:
  std::weak_ptr<AutogradReducer> reducer_;
};

class AutogradReducer final
    : public Reducer,
      public std::enable_shared_from_this<AutogradReducer> {
 public:
  AutogradReducer(std::shared_ptr<distributed::Group> group,
                  std::vector<NamedTensor> parameters,
                  const std::vector<NamedTensor>& buffers,
                  const DistributedDataParallelOptions& options)
      : parameters_(std::move(parameters)),
        transport_(make_transport(group, parameters_, options)),
        buffers_(options.broadcast_buffers
                     ? std::make_unique<BufferSync>(std::move(group), buffers)
                     : nullptr),
        ready_(parameters_.size(), false) {}

  /// After construction, since hooks hold weak pointers.
  void attach() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& [name, tensor] = parameters_[i];
      auto& slot = torch::autograd::impl::post_acc_grad_hooks(tensor);
      auto* other = dynamic_cast<GradientHook*>(slot.get());
      if (other && other->alive()) {
        throw InvalidArgument("parameter \"" + name +
                              "\" belongs to another DistributedDataParallel "
                              "that is still alive; destroy that one first");
      }
      if (other) slot = other->take_next();
      torch::autograd::impl::set_post_acc_grad_hooks(
          tensor,
          std::make_unique<GradientHook>(weak_from_this(), i, std::move(slot)));
    }
  }

  void before_forward(bool training) override {
    if (!c10::GradMode::is_enabled()) return;
    averaging_ = no_sync_depth_ == 0;
    if (training && averaging_ && buffers_) buffers_->broadcast();
  }

  void watch(const at::Tensor& output) override {
    if (!transport_->has_arena() || !c10::GradMode::is_enabled()) return;
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<OutputHook>(weak_from_this()));
    }
  }

  void enter_no_sync() noexcept override { ++no_sync_depth_; }
  void leave_no_sync() noexcept override { --no_sync_depth_; }

  void on_output() {
    open_pass();
    // After an abandoned round peers may still be at work in the arena, until
    // the next round has begun.
    if (!round_abandoned_) transport_->start_arena();
  }

  void on_gradient(size_t index) {
    if (!averaging_) return;
    const auto& [name, tensor] = parameters_[index];
    check_gradient(name, tensor);
    open_pass();
    if (n_ready_ == 0) {
      transport_->begin();
      round_abandoned_ = false;
      transport_->start_arena();
    }
    if (ready_[index]) {
      throw Unsupported(
          "parameter \"" + name +
          "\" got its gradient twice in one backward pass (a "
          "backward inside a backward); run that part in no_sync");
    }
    ready_[index] = true;
    ++n_ready_;
    transport_->ready(index);
  }

  void finish_pass() {
    transport_->stop_arena();
    if (n_ready_ == 0) return;
    if (n_ready_ < parameters_.size()) {
      std::vector<size_t> missing;
      for (size_t i = 0; i < ready_.size(); ++i) {
        if (!ready_[i]) missing.push_back(i);
      }
      transport_->fail_unready(missing);
    }
    transport_->finish();
    reset();
  }

  /// The pass is over, well or not.
  void close_pass() noexcept {
    transport_->stop_arena();
    if (n_ready_ == 0) return;
    transport_->abandon();
    round_abandoned_ = true;
    reset();
  }

 private:
  void open_pass() {
    if (!pass_.expired()) return;
    auto pass = std::make_shared<Pass>(shared_from_this());
    pass_ = pass;
    Engine::get_default_engine().queue_callback(
        [pass = std::move(pass)] { pass->end(); });
  }

  void reset() noexcept {
    ready_.assign(ready_.size(), false);
    n_ready_ = 0;
  }

  static void check_gradient(const std::string& name,
                             const at::Tensor& parameter) {
    if (c10::GradMode::is_enabled()) {
      throw Unsupported(
          "backward with create_graph reached parameter \"" + name +
          "\" of a DistributedDataParallel: averaged gradients cannot be "
          "differentiated again; use torch::autograd::grad for the inner "
          "derivative, or no_sync");
    }
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    if (gradient.layout() != at::kStrided) {
      throw Unsupported("parameter \"" + name +
                        "\" has a sparse gradient, which cannot be averaged "
                        "yet; make its layer dense (sparse=false)");
    }
  }

  std::vector<NamedTensor> parameters_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<BufferSync> buffers_;
  int no_sync_depth_ = 0;
  bool averaging_ = false;
  bool round_abandoned_ = false;
  std::weak_ptr<Pass> pass_;
  std::vector<bool> ready_;
  size_t n_ready_ = 0;
};

Pass::~Pass() {
  reducer_->close_pass();
}

void Pass::end() {
  reducer_->finish_pass();
}

void GradientHook::operator()(const at::Tensor& parameter) {
  if (next_) (*next_)(parameter);
  if (const auto reducer = reducer_.lock()) reducer->on_gradient(index_);
}

std::vector<at::Tensor> OutputHook::operator()(
    const std::vector<at::Tensor>& gradients) {
  if (const auto reducer = reducer_.lock()) reducer->on_output();
  return gradients;
}

/// The trainable ones, each once: tied weights have several names.
std::vector<NamedTensor> trainable(const std::vector<NamedTensor>& all) {
  std::vector<NamedTensor> result;
  std::unordered_set<const void*> seen;
  for (const auto& named : all) {
    if (named.tensor.defined() && named.tensor.requires_grad() &&
        seen.insert(named.tensor.unsafeGetTensorImpl()).second) {
      result.push_back(named);
    }
  }
  return result;
}

void copy_from_rank_0(const std::vector<NamedTensor>& tensors) {
  for (const auto& named : tensors) {
    auto values = named.tensor.detach();
    broadcast(values);
  }
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(
    std::vector<NamedTensor> parameters,
    std::vector<NamedTensor> buffers,
    const DistributedDataParallelOptions& options) {
  if (!(options.bucket_cap_mb > 0)) {
    throw InvalidArgument("bucket_cap_mb is " +
                          std::to_string(options.bucket_cap_mb) +
                          "; it must be above 0");
  }
  auto group = distributed::require_default_group("DistributedDataParallel");
  // Before all that may fail on one rank alone.
  if (group->world_size > 1) check_same_model(parameters, buffers);
  auto averaged = trainable(parameters);
  if (averaged.empty()) {
    throw InvalidArgument(
        "the module has no parameter that requires a gradient; "
        "DistributedDataParallel is not needed for it");
  }
  if (options.memory_policy) memory::enable_by_default();
  if (group->world_size == 1) return nullptr;

  copy_from_rank_0(parameters);
  copy_from_rank_0(buffers);
  auto reducer = std::make_shared<AutogradReducer>(
      std::move(group), std::move(averaged), buffers, options);
  reducer->attach();
  return reducer;
}

}  // namespace lockstep::nn
