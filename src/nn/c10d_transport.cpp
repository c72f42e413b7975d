#include "nn/c10d_transport.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "nn/unready.h"

namespace lockstep::nn {
namespace {

constexpr double kMiB = 1024 * 1024;

}  // namespace

struct C10dTransport::Bucket {
  std::vector<size_t> parameters;
  size_t waiting_for = 0;
  at::Tensor flat;
  c10::intrusive_ptr<c10d::Work> work;

  /// The part of the bucket that belongs to each parameter, in its shape.
  template <class Visit>
  void for_each_part(const std::vector<NamedTensor>& all, const Visit& visit) {
    int64_t offset = 0;
    for (const size_t index : parameters) {
      const auto& parameter = all[index].tensor;
      visit(parameter.mutable_grad(),
            flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
      offset += parameter.numel();
    }
  }
};

C10dTransport::C10dTransport(std::shared_ptr<distributed::Group> group,
                             const std::vector<NamedTensor>& parameters,
                             double bucket_cap_mb)
    : group_(std::move(group)),
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
    int64_t numel = 0;
    for (const size_t i : bucket.parameters) {
      numel += parameters[i].tensor.numel();
    }
    bucket.flat =
        at::empty({numel}, parameters[bucket.parameters[0]].tensor.options());
  }
}

C10dTransport::~C10dTransport() = default;

void C10dTransport::begin() {
  // What an abandoned round left under way still writes to the buckets.
  for (auto& bucket : buckets_) {
    if (bucket.work) wait(bucket);
    bucket.waiting_for = bucket.parameters.size();
  }
  launched_ = 0;
}

void C10dTransport::ready(size_t index) {
  --buckets_[bucket_of_[index]].waiting_for;
  while (launched_ < buckets_.size() && buckets_[launched_].waiting_for == 0) {
    launch(buckets_[launched_++]);
  }
}

void C10dTransport::launch(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  bucket.for_each_part(parameters_, [](at::Tensor& gradient, at::Tensor part) {
    part.copy_(gradient);
  });
  std::vector<at::Tensor> tensors{bucket.flat};
  try {
    bucket.work = group_->backend->allreduce(tensors, {});
  } catch (...) {
    rethrow_failure();
  }
}

void C10dTransport::wait(Bucket& bucket) {
  const auto work = std::exchange(bucket.work, nullptr);
  try {
    work->wait(group_->timeout);
  } catch (...) {
    rethrow_failure();
  }
}

/// Call in a catch block. Survivors of a death may see each other leave first:
/// the lost peer is what counts.
void C10dTransport::rethrow_failure() const {
  const auto context = group_->context("backward");
  if (group_->liveness) {
    std::vector<int> others;
    for (int rank = 0; rank < group_->world_size; ++rank) {
      if (rank != group_->rank) others.push_back(rank);
    }
    if (const auto lost = group_->liveness->peer_lost(others, context)) {
      throw *lost;
    }
  }
  distributed::rethrow_converted(context);
}

void C10dTransport::finish() {
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    wait(bucket);
    bucket.flat.div_(group_->world_size);
    bucket.for_each_part(parameters_,
                         [](at::Tensor& gradient, const at::Tensor& part) {
                           gradient.copy_(part);
                         });
  }
}

void C10dTransport::fail_unready(const std::vector<size_t>& missing) {
  const InvalidArgument error(unready_message(parameters_, missing),
                              group_->context("backward"));
  if (group_->liveness) group_->liveness->announce_failure(error.message());
  throw error;
}

void C10dTransport::abandon() noexcept {
}

}  // namespace lockstep::nn
