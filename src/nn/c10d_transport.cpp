#include "nn/c10d_transport.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "nn/messages.h"

namespace lockstep::nn {
namespace {

constexpr double kMiB = 1024 * 1024;

// A rank's mark: it gave this round up, or the one before when that was on its
// way already.
constexpr double kGaveUp = 1;
constexpr double kGaveUpLate = -1;

}  // namespace

struct C10dTransport::Bucket {
  std::vector<size_t> parameters;
  size_t waiting_for = 0;
  at::Tensor flat;
  std::vector<at::Tensor> parts;  ///< of `flat`, in the parameters' shapes
  at::Tensor marks;               ///< the rest of it
  c10::intrusive_ptr<c10d::Work> work;

  void allocate(const std::vector<NamedTensor>& all, int world_size) {
    int64_t numel = 0;
    for (const size_t index : parameters) numel += all[index].tensor.numel();
    const auto n_marks = world_size + static_cast<int64_t>(parameters.size());
    flat = at::empty({numel + n_marks},
                     all[parameters[0]].tensor.options().requires_grad(false));
    marks = flat.narrow(0, numel, n_marks);
    int64_t offset = 0;
    for (const size_t index : parameters) {
      const auto& parameter = all[index].tensor;
      parts.push_back(
          flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
      offset += parameter.numel();
    }
  }

  [[nodiscard]] bool is_marked() const { return marks.any().item<bool>(); }
};

C10dTransport::C10dTransport(std::shared_ptr<distributed::Group> group,
                             const std::vector<NamedTensor>& parameters,
                             double bucket_cap_mb)
    : Transport(std::move(group)),
      backend_averages_(group_->liveness != nullptr),  // c10d's Gloo cannot
      parameters_(parameters),
      bucket_of_(parameters.size()) {
  double cap = std::min(bucket_cap_mb, 1.0) * kMiB;
  double bytes = 0;
  for (size_t i = parameters.size(); i-- > 0;) {
    const auto& parameter = parameters[i].tensor;
    const bool other_kind =
        !buckets_.empty() &&
        parameters[buckets_.back().parameters[0]].tensor.options().dtype() !=
            parameter.dtype();
    if (buckets_.empty() || other_kind || bytes >= cap) {
      if (!buckets_.empty()) cap = bucket_cap_mb * kMiB;
      buckets_.emplace_back();
      bytes = 0;
    }
    buckets_.back().parameters.push_back(i);
    bucket_of_[i] = buckets_.size() - 1;
    bytes += static_cast<double>(parameter.nbytes());
  }
  for (auto& bucket : buckets_) {
    bucket.allocate(parameters_, group_->world_size);
  }
}

C10dTransport::~C10dTransport() = default;

void C10dTransport::begin() {
  check_usable();
  // What an abandoned round left under way still writes to the buckets.
  for (auto& bucket : buckets_) {
    if (bucket.work) wait(bucket);
    bucket.waiting_for = bucket.parameters.size();
  }
  launched_ = 0;
  open_ = true;
  mark_ = std::exchange(gave_up_late_, false) ? kGaveUpLate : 0;
  missing_.clear();
}

void C10dTransport::ready(size_t index) {
  --buckets_[bucket_of_[index]].waiting_for;
  while (launched_ < buckets_.size() && buckets_[launched_].waiting_for == 0) {
    auto& bucket = buckets_[launched_++];
    fill(bucket);
    launch(bucket);
  }
}

void C10dTransport::fill(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  const double share = 1.0 / group_->world_size;
  for (size_t i = 0; i < bucket.parts.size(); ++i) {
    const auto& gradient = parameters_[bucket.parameters[i]].tensor.grad();
    if (backend_averages_) {
      bucket.parts[i].copy_(gradient);
    } else {
      at::mul_out(bucket.parts[i], gradient, at::scalar_tensor(share));
    }
  }
}

void C10dTransport::launch(Bucket& bucket) {
  bucket.marks.zero_();
  if (mark_ != 0) bucket.marks[group_->rank].fill_(mark_);
  for (const size_t index : missing_) {
    const auto& all = bucket.parameters;
    const auto found = std::find(all.begin(), all.end(), index);
    if (found == all.end()) continue;
    bucket.marks[group_->world_size + (found - all.begin())].fill_(1);
  }
  std::vector<at::Tensor> tensors{bucket.flat};
  c10d::AllreduceOptions options;
  if (backend_averages_) options.reduceOp = c10d::ReduceOp::AVG;
  try {
    bucket.work = group_->backend->allreduce(tensors, options);
  } catch (...) {
    // An operation under way that failed before says more.
    for (auto& other : buckets_) {
      if (other.work) wait(other);
    }
    rethrow_failure();
  }
}

void C10dTransport::wait(Bucket& bucket) {
  const auto work = std::exchange(bucket.work, nullptr);
  try {
    work->wait();
  } catch (...) {
    rethrow_failure();
  }
}

/// Call in a catch block. Survivors of a death may see each other leave first:
/// the lost peer is what counts.
void C10dTransport::rethrow_failure() {
  fail_for_good();
  const auto context = group_->context("backward");
  if (group_->liveness && group_->liveness->failure()) {
    if (const auto lost = group_->liveness->peer_lost({}, context)) throw *lost;
  }
  distributed::rethrow_converted(context);
}

void C10dTransport::finish() {
  open_ = false;
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    wait(bucket);
    if (bucket.is_marked()) fail_given_up();
    for (size_t i = 0; i < bucket.parts.size(); ++i) {
      const auto& parameter = parameters_[bucket.parameters[i]].tensor;
      parameter.mutable_grad().copy_(bucket.parts[i]);
    }
  }
}

/// Some rank gave the round up: throws MismatchError that names it.
void C10dTransport::fail_given_up() {
  const auto ranks = group_->world_size;
  std::optional<int> culprit;
  std::vector<size_t> missing;
  bool late = false;
  for (auto& bucket : buckets_) {
    if (bucket.work) wait(bucket);
    const auto marks = bucket.marks.to(at::kCPU, at::kDouble);
    const auto* mark = marks.const_data_ptr<double>();
    for (int rank = ranks; rank-- > 0;) {
      if (mark[rank] != 0) {
        culprit = group_->ranks[rank];
        late = mark[rank] < 0;
      }
    }
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      if (mark[ranks + i] != 0) missing.push_back(bucket.parameters[i]);
    }
  }
  std::sort(missing.begin(), missing.end());
  auto context = group_->context("backward");
  context.peers = {*culprit};
  throw MismatchError(late ? gave_up_late_message(*culprit)
                           : gave_up_message(*culprit, parameters_, missing),
                      context);
}

void C10dTransport::fail_unready(const std::vector<size_t>& missing) {
  missing_ = missing;
  throw InvalidArgument(unready_message(parameters_, missing),
                        group_->context("backward"));
}

void C10dTransport::abandon() noexcept {
  if (!std::exchange(open_, false) || !usable()) return;
  gave_up_late_ = launched_ == buckets_.size();
  if (mark_ == 0) mark_ = kGaveUp;
  try {
    while (launched_ < buckets_.size()) launch(buckets_[launched_++]);
  } catch (const std::exception&) {
    // The group failed; the next round says so.
  }
}

}  // namespace lockstep::nn
