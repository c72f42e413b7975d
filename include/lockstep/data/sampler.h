#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "lockstep/core/export.h"

namespace lockstep::data {

/// A CPU generator that starts from `seed`: Python's
/// `torch.Generator().manual_seed(seed)`, with the same stream of numbers.
[[nodiscard]] LOCKSTEP_API at::Generator make_generator(int64_t seed);

/// Decides which items a pass over a data set visits, and in which order.
///
/// Derive from it for an order of your own. A loader holds a copy of the
/// sampler it is given: state that the program changes later (an epoch, say)
/// belongs behind a `std::shared_ptr` that copies share, as it is here.
/// Mirrors `torch.utils.data.Sampler`.
class LOCKSTEP_API Sampler {
 public:
  virtual ~Sampler();

  /// Begins a pass. Returns its indices: 1-d, int64, on the CPU.
  virtual at::Tensor next_pass() = 0;
  /// Number of indices in a pass.
  [[nodiscard]] virtual int64_t size() const = 0;

 protected:
  Sampler() = default;
  Sampler(const Sampler&) = default;
  Sampler& operator=(const Sampler&) = default;
};

/// 0, 1, ..., size-1. Mirrors `torch.utils.data.SequentialSampler`.
class LOCKSTEP_API SequentialSampler final : public Sampler {
 public:
  /// \throws InvalidArgument when `size` is negative
  explicit SequentialSampler(int64_t size);
  ~SequentialSampler() override;

  at::Tensor next_pass() override;
  [[nodiscard]] int64_t size() const override { return size_; }

 private:
  int64_t size_;
};

struct RandomSamplerOptions {
  /// Draw with replacement.
  bool replacement = false;
  /// Indices per pass; unset: the number of items.
  std::optional<int64_t> num_samples = {};
  /// Where the numbers come from. Unset: each pass seeds a generator from
  /// libtorch's default one, so `torch::manual_seed` decides.
  std::optional<at::Generator> generator = {};
};

/// A fresh random order per pass, in exactly the order of
/// `torch.utils.data.RandomSampler` for the same generator. Copies share the
/// generator.
class LOCKSTEP_API RandomSampler final : public Sampler {
 public:
  /// `size`: number of items to choose from.
  /// \throws InvalidArgument when `size` is negative or `num_samples` (as given
  ///     or by default) is not positive
  explicit RandomSampler(int64_t size, RandomSamplerOptions options = {});
  ~RandomSampler() override;

  at::Tensor next_pass() override;
  [[nodiscard]] int64_t size() const override { return num_samples_; }

 private:
  int64_t items_;
  int64_t num_samples_;
  bool replacement_;
  std::optional<at::Generator> generator_;
};

/// Any sampler, or none. Made implicitly from every type derived from
/// `Sampler` (which it copies or moves) and from a `std::shared_ptr` to one
/// (which it shares).
class AnySampler {
 public:
  AnySampler() = default;
  template <std::derived_from<Sampler> S>
  AnySampler(S sampler) : sampler_(std::make_shared<S>(std::move(sampler))) {}
  template <std::derived_from<Sampler> S>
  AnySampler(std::shared_ptr<S> sampler) : sampler_(std::move(sampler)) {}

  explicit operator bool() const { return sampler_ != nullptr; }
  Sampler* operator->() const { return sampler_.get(); }

 private:
  std::shared_ptr<Sampler> sampler_;
};

}  // namespace lockstep::data
