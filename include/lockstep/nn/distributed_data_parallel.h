#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/for_each_tensor.h"
#include "lockstep/nn/reducer.h"

namespace lockstep {

/// Trains one model on all ranks of the default group: every rank forwards its
/// own part of the batch, and each backward pass averages the gradients over
/// the ranks while it runs. Mirrors
/// `torch.nn.parallel.DistributedDataParallel`.
///
/// ```cpp
/// auto model = lockstep::DistributedDataParallel(net);
/// torch::optim::SGD optimizer(model->parameters(), 0.01);
/// model->forward(x);
/// ```
///
/// `Module` is a `torch::nn::ModuleHolder` (`Sequential`, `TORCH_MODULE`), a
/// `std::shared_ptr` to a module, a `torch::nn::AnyModule`, a
/// `torch::jit::Module`, or any callable with `parameters()`. Names get no
/// prefix. In a world of one everything goes straight to the module.
///
/// A pass is averaged when it goes through an output of a `forward` that was
/// called outside `no_sync`, and so is the first pass after such a forward.
/// Every trainable parameter must get a gradient in such a pass. The gradients
/// that `backward` leaves are equal on all ranks, bit for bit, and repeat: they
/// are summed in rank order.
///
/// Copies share the module and its gradients' exchange. All calls of one
/// wrapper come from one thread.
template <class Module>
class DistributedDataParallel {
 public:
  /// Collective and blocking: compares the models of all ranks, then copies
  /// rank 0's parameters and buffers to all. Shares ownership of the module.
  /// Move the module to its device before.
  /// \throws InvalidArgument  no parameter requires a gradient; a parameter
  ///     belongs to another living wrapper whose group can be used; parameters
  ///     on several devices; no group where one is needed
  /// \throws Unsupported  a trainable parameter's dtype cannot be averaged
  /// \throws MismatchError  on every rank, naming the first parameter or buffer
  ///     whose name, shape, dtype or requires_grad differs
  /// \throws TimeoutError, PeerLost, BackendError
  explicit DistributedDataParallel(
      Module module, const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)),
        reducer_(nn::Reducer::create(
            named_tensors<kParameters>(), named_tensors<kBuffers>(), options)) {
  }

  DistributedDataParallel* operator->() { return this; }
  const DistributedDataParallel* operator->() const { return this; }

  /// Forwards any arguments to the module and returns what it returns. In
  /// training mode with gradients enabled rank 0's buffers come first; in
  /// evaluation mode or under `torch::NoGradGuard` nothing is communicated.
  /// `Return` is for modules whose forward asks for it (`Sequential`,
  /// `AnyModule`): `model->forward<std::tuple<Tensor, Tensor>>(x)`.
  /// \throws what the module throws; TimeoutError, PeerLost, BackendError
  template <class Return = void, class... Args>
  auto forward(Args&&... args) {
    if (!reducer_) return call<Return>(std::forward<Args>(args)...);
    reducer_->before_forward(is_training());
    auto outputs = call<Return>(std::forward<Args>(args)...);
    nn::for_each_tensor(
        outputs, [this](const at::Tensor& output) { reducer_->watch(output); });
    return outputs;
  }

  /// Leaves the gradients of passes through forwards inside the scope alone on
  /// their rank; they add up, and the first averaged pass averages the sum.
  /// Scopes nest and end with an exception too. Mirrors `no_sync`.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(std::shared_ptr<nn::Reducer> reducer)
        : reducer_(std::move(reducer)) {
      if (reducer_) reducer_->enter_no_sync();
    }
    ~NoSync() {
      if (reducer_) reducer_->leave_no_sync();
    }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<nn::Reducer> reducer_;
  };
  NoSync no_sync() { return NoSync(reducer_); }

  /// The wrapped module with its type.
  Module& module() { return module_; }
  const Module& module() const { return module_; }

  auto parameters() { return root().parameters(); }
  auto named_parameters() { return root().named_parameters(); }
  auto buffers() { return root().buffers(); }
  auto named_buffers() { return root().named_buffers(); }

  void train(bool on = true) { root().train(on); }
  void eval() { root().eval(); }
  bool is_training() {
    if constexpr (requires(DistributedDataParallel & self) {
                    self.root().is_training();
                  }) {
      return root().is_training();
    } else {
      return true;
    }
  }

  /// Accepted when every parameter is there already.
  /// \throws InvalidArgument  otherwise: gradients are exchanged where the
  ///     parameters were when the module was wrapped
  void to(c10::Device device) { check_move(device, std::nullopt); }
  void to(c10::ScalarType dtype) { check_move(std::nullopt, dtype); }
  void to(c10::Device device, c10::ScalarType dtype) {
    check_move(device, dtype);
  }

 private:
  enum Kind { kParameters, kBuffers };

  /// The object that has `parameters()`, behind holders and pointers.
  auto& root() {
    if constexpr (requires(Module & m) { m.ptr()->parameters(); }) {
      return *module_.ptr();
    } else if constexpr (requires(Module & m) { m->parameters(); }) {
      return *module_;
    } else {
      return module_;
    }
  }

  template <class Return, class... Args>
  auto call(Args&&... args) {
    if constexpr (!std::is_void_v<Return>) {
      if constexpr (requires { module_->template forward<Return>(args...); }) {
        return module_->template forward<Return>(std::forward<Args>(args)...);
      } else {
        return module_.template forward<Return>(std::forward<Args>(args)...);
      }
    } else if constexpr (requires {
                           module_->forward(std::forward<Args>(args)...);
                         }) {
      return module_->forward(std::forward<Args>(args)...);
    } else if constexpr (requires {
                           module_.forward(std::forward<Args>(args)...);
                         }) {
      return module_.forward(std::forward<Args>(args)...);
    } else {
      return module_(std::forward<Args>(args)...);
    }
  }

  template <Kind kind>
  std::vector<nn::NamedTensor> named_tensors() {
    std::vector<nn::NamedTensor> result;
    const auto add = [&](const auto& items) {
      for (const auto& item : items) {
        if constexpr (std::is_convertible_v<decltype(item), at::Tensor>) {
          result.push_back({std::to_string(result.size()), item});
        } else if constexpr (requires { item.key(); }) {
          result.push_back({item.key(), item.value()});
        } else {
          result.push_back({item.name, item.value});
        }
      }
    };
    auto& module = root();
    if constexpr (kind == kParameters) {
      if constexpr (requires { module.named_parameters(); }) {
        add(module.named_parameters());
      } else {
        add(module.parameters());
      }
    } else if constexpr (requires { module.named_buffers(); }) {
      add(module.named_buffers());
    }
    return result;
  }

  void check_move(std::optional<c10::Device> device,
                  std::optional<c10::ScalarType> dtype) {
    for (const auto& [name, tensor] : named_tensors<kParameters>()) {
      if (tensor.device() != device.value_or(tensor.device()) ||
          tensor.scalar_type() != dtype.value_or(tensor.scalar_type())) {
        throw InvalidArgument(
            "to() would move parameter \"" + name +
            "\", but its gradients are exchanged where it was when the module "
            "was wrapped; call to() on the module before wrapping it");
      }
    }
  }

  Module module_;
  std::shared_ptr<nn::Reducer> reducer_;
};

}  // namespace lockstep
