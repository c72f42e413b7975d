#include "lockstep/data/distributed_sampler.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep::data {

struct DistributedSampler::State {
  std::mutex mutex;
  int64_t epoch = 0;
};

DistributedSampler::DistributedSampler(int64_t size,
                                       const DistributedSamplerOptions& options)
    : items_(size),
      num_replicas_(options.num_replicas ? *options.num_replicas
                                         : get_world_size()),
      rank_(options.rank ? *options.rank : get_rank()),
      shuffle_(options.shuffle),
      seed_(options.seed),
      state_(std::make_shared<State>()) {
  if (items_ < 0) {
    throw InvalidArgument(
        "DistributedSampler: the number of items must not be negative, but "
        "is " +
        std::to_string(items_));
  }
  if (num_replicas_ < 1) {
    throw InvalidArgument(
        "DistributedSampler: num_replicas must be positive, but is " +
        std::to_string(num_replicas_));
  }
  if (rank_ < 0 || rank_ >= num_replicas_) {
    throw InvalidArgument("DistributedSampler: rank must be in [0, " +
                          std::to_string(num_replicas_ - 1) + "], but is " +
                          std::to_string(rank_));
  }
  if (options.drop_last && options.exact) {
    throw InvalidArgument(
        "DistributedSampler: drop_last and exact exclude each other; set one");
  }
  const int64_t whole = items_ / num_replicas_;
  const int64_t rest = items_ % num_replicas_;
  if (options.drop_last) {
    num_samples_ = whole;
  } else if (options.exact) {
    num_samples_ = whole + (rank_ < rest ? 1 : 0);
  } else {
    num_samples_ = whole + (rest > 0 ? 1 : 0);
  }
}

DistributedSampler::~DistributedSampler() = default;

at::Tensor DistributedSampler::next_pass() {
  uint64_t seed = static_cast<uint64_t>(seed_);
  {
    const std::scoped_lock lock(state_->mutex);
    seed += static_cast<uint64_t>(state_->epoch++);
  }
  const auto options = at::TensorOptions(at::kLong).device(at::kCPU);
  const auto order =
      shuffle_
          ? at::randperm(
                items_, make_generator(static_cast<int64_t>(seed)), options)
          : at::arange(items_, options);
  auto mine = at::empty({num_samples_}, options);
  const auto* from = order.const_data_ptr<int64_t>();
  auto* to = mine.mutable_data_ptr<int64_t>();
  int64_t position = rank_;
  for (int64_t i = 0; i < num_samples_; ++i, position += num_replicas_) {
    // Positions past the end are the padding, which repeats the order.
    if (position >= items_) position %= items_;
    to[i] = from[position];
  }
  return mine;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  const std::scoped_lock lock(state_->mutex);
  state_->epoch = epoch;
}

int64_t DistributedSampler::epoch() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->epoch;
}

}  // namespace lockstep::data
