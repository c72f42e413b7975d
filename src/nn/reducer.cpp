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
#include "nn/messages.h"
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
  /// Whether its wrapper lives, and can average yet.
  [[nodiscard]] bool in_use() const;
  /// The hook that was there before.
  std::unique_ptr<PostAccumulateGradHook> take_next() {
    return std::move(next_);
  }

 private:
  std::weak_ptr<AutogradReducer> reducer_;
  size_t index_;
  std::unique_ptr<PostAccumulateGradHook> next_;
};

/// Runs before a backward pass enters the part of the graph that a forward
/// made.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::weak_ptr<AutogradReducer> reducer, bool averaged)
      : reducer_(std::move(reducer)), averaged_(averaged) {}
  std::vector<at::Tensor> operator()(
      const std::vector<at::Tensor>& gradients) override;

 private:
  std::weak_ptr<AutogradReducer> reducer_;
  bool averaged_;
};

/// The hook that a living wrapper has put on the parameter.
GradientHook* hook_of(const at::Tensor& parameter) {
  return dynamic_cast<GradientHook*>(
      torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

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
        ready_(parameters_.size(), false) {
    for (const auto& [name, tensor] : parameters_) {
      kinds_.push_back({tensor.scalar_type(), tensor.nbytes()});
    }
  }

  [[nodiscard]] bool usable() const { return transport_->usable(); }

  /// After construction, since hooks hold weak pointers.
  void attach() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& tensor = parameters_[i].tensor;
      auto& slot = torch::autograd::impl::post_acc_grad_hooks(tensor);
      if (auto* other = hook_of(tensor)) slot = other->take_next();
      torch::autograd::impl::set_post_acc_grad_hooks(
          tensor,
          std::make_unique<GradientHook>(weak_from_this(), i, std::move(slot)));
    }
  }

  void before_forward(bool training) override {
    if (!c10::GradMode::is_enabled()) return;
    if (no_sync_depth_ > 0) return;
    if (training && buffers_) buffers_->broadcast();
    averaging_ = true;
  }

  void watch(const at::Tensor& output) override {
    if (!c10::GradMode::is_enabled()) return;
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(
          std::make_unique<OutputHook>(weak_from_this(), no_sync_depth_ == 0));
    }
  }

  void enter_no_sync() noexcept override { ++no_sync_depth_; }
  void leave_no_sync() noexcept override { --no_sync_depth_; }

  void on_output(bool averaged) {
    averaging_ = averaging_ || averaged;
    // Here and not at the first gradient, which may come from a pass inside
    // this one (activation checkpointing).
    open_pass();
    // After an abandoned round peers may still be at work in the arena, until
    // the next round has begun.
    if (!round_abandoned_) transport_->start_arena();
  }

  void on_gradient(size_t index) {
    if (!averaging_) return;
    check_gradient(index);
    open_pass();
    if (n_ready_++ == 0) {
      transport_->begin();
      round_abandoned_ = false;
      transport_->start_arena();
    }
    if (ready_[index]) {
      throw Unsupported(
          "parameter \"" + parameters_[index].name +
          "\" got its gradient twice in one backward pass (a "
          "backward inside a backward); run that part in no_sync");
    }
    ready_[index] = true;
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

  /// The next pass is averaged if it begins at an averaged output, or follows
  /// such a forward.
  void reset() noexcept {
    averaging_ = false;
    ready_.assign(ready_.size(), false);
    n_ready_ = 0;
  }

  void check_gradient(size_t index) const {
    const auto& [name, parameter] = parameters_[index];
    if (kinds_[index] != Kind{parameter.scalar_type(), parameter.nbytes()}) {
      throw InvalidArgument(converted_message("parameter", name));
    }
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

  using Kind = std::pair<c10::ScalarType, size_t>;  ///< dtype, bytes

  std::vector<NamedTensor> parameters_;
  std::vector<Kind> kinds_;  ///< of the parameters when they were wrapped
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<BufferSync> buffers_;
  int no_sync_depth_ = 0;
  bool averaging_ = false;  ///< the pass under way, or else the next one
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

bool GradientHook::in_use() const {
  const auto reducer = reducer_.lock();
  return reducer && reducer->usable();
}

void GradientHook::operator()(const at::Tensor& parameter) {
  if (next_) (*next_)(parameter);
  if (const auto reducer = reducer_.lock()) reducer->on_gradient(index_);
}

std::vector<at::Tensor> OutputHook::operator()(
    const std::vector<at::Tensor>& gradients) {
  if (const auto reducer = reducer_.lock()) reducer->on_output(averaged_);
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

void check_not_in_use(const std::vector<NamedTensor>& parameters) {
  for (const auto& [name, tensor] : parameters) {
    const auto* hook = hook_of(tensor);
    if (hook == nullptr || !hook->in_use()) continue;
    throw InvalidArgument("parameter \"" + name +
                          "\" belongs to another DistributedDataParallel "
                          "that is still alive; destroy that one first");
  }
}

/// Whether gradients of all parameters can be averaged.
void check_supported(const std::vector<NamedTensor>& parameters) {
  const auto& first = parameters.front();
  for (const auto& named : parameters) {
    const auto& tensor = named.tensor;
    if (tensor.device() != first.tensor.device()) {
      throw InvalidArgument("parameter \"" + first.name + "\" is on " +
                            first.tensor.device().str() + ", \"" + named.name +
                            "\" on " + tensor.device().str() +
                            "; move the module to one device before wrapping "
                            "it");
    }
    const auto type = tensor.scalar_type();
    if (at::isFloatingType(type) && !c10::isFloat8Type(type)) continue;
    throw Unsupported("parameter \"" + named.name + "\" has dtype " +
                      c10::toString(type) +
                      ", whose gradients cannot be averaged; use float, "
                      "double, half or bfloat16");
  }
}

void copy_from_rank_0(const std::vector<NamedTensor>& tensors,
                      const ProcessGroup& group) {
  for (const auto& named : tensors) {
    auto values = named.tensor.detach();
    broadcast(values, {.group = group, .group_src = 0});
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
  auto group = distributed::require_group(options.process_group,
                                          "DistributedDataParallel");
  if (!group->is_member()) {
    throw InvalidArgument(
        "this rank does not belong to process_group; wrap the module on the "
        "group's members alone",
        group->context("DistributedDataParallel"));
  }
  auto averaged = trainable(parameters);
  check_not_in_use(averaged);
  // Before all that may fail on one rank alone.
  if (group->world_size > 1) check_same_model(parameters, buffers, group);
  if (averaged.empty()) {
    throw InvalidArgument(
        "the module has no parameter that requires a gradient; "
        "DistributedDataParallel is not needed for it");
  }
  if (options.memory_policy) memory::enable_by_default();
  if (group->world_size == 1) return nullptr;
  check_supported(averaged);

  copy_from_rank_0(parameters, ProcessGroup(group));
  copy_from_rank_0(buffers, ProcessGroup(group));
  auto reducer = std::make_shared<AutogradReducer>(
      std::move(group), std::move(averaged), buffers, options);
  reducer->attach();
  return reducer;
}

}  // namespace lockstep::nn
