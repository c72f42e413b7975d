#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/core/export.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

struct DistributedSamplerOptions {
  /// Number of ranks that share the data; unset: the default group's size.
  std::optional<int> num_replicas = {};
  /// Own rank; unset: the default group's.
  std::optional<int> rank = {};
  /// A new order per epoch, the same on all ranks; else 0, 1, 2, ...
  bool shuffle = true;
  /// Must be the same on all ranks.
  int64_t seed = 0;
  /// Drop the tail that does not divide evenly, instead of repeating items.
  bool drop_last = false;
  /// Neither drop nor repeat: every item is visited by one rank only, and
  /// ranks differ by at most one item. For evaluation, without gradient
  /// synchronisation. Excludes `drop_last`.
  bool exact = false;
};

/// Splits a data set among the ranks, in exactly the order of
/// `torch.utils.data.distributed.DistributedSampler`: `randperm` seeded with
/// seed + epoch, padded by repetition to a multiple of `num_replicas`, of which
/// this rank takes every `num_replicas`-th, beginning at `rank`.
///
/// A pass after `set_epoch(e)` is epoch e; each further pass is the next epoch,
/// so that orders differ between epochs without a call (Python repeats the same
/// order there). The first pass is epoch 0. All ranks must begin the same
/// passes. Copies share the epoch: set it on any of them.
///
/// Thread safety: calls on copies from several threads are safe.
class LOCKSTEP_API DistributedSampler final : public Sampler {
 public:
  /// `size`: number of items. Outside a group it is a world of one.
  /// \throws InvalidArgument when `size` is negative, `num_replicas` is not
  ///     positive, `rank` is outside it, or `drop_last` and `exact` are both
  ///     set
  explicit DistributedSampler(int64_t size,
                              const DistributedSamplerOptions& options = {});
  ~DistributedSampler() override;

  at::Tensor next_pass() override;
  /// Number of indices in this rank's pass.
  [[nodiscard]] int64_t size() const override { return num_samples_; }
  /// Makes the next pass epoch `epoch`, also for every copy of this sampler.
  void set_epoch(int64_t epoch);
  /// The epoch of the next pass.
  [[nodiscard]] int64_t epoch() const;

 private:
  struct State;

  int64_t items_;
  int64_t num_replicas_;
  int64_t rank_;
  int64_t num_samples_;
  bool shuffle_;
  int64_t seed_;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::data
