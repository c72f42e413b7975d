#include "nn/transport.h"

#include <algorithm>

#include "comm/liveness.h"
#include "distributed/group.h"
#include "nn/c10d_transport.h"
#include "nn/shm_transport.h"

namespace lockstep::nn {

bool Transport::usable() const noexcept {
  return !failed_ && !group_->destroyed;
}

void Transport::check_usable() const {
  if (usable()) return;
  throw InvalidArgument(
      group_->destroyed
          ? "the group was destroyed; call init_process_group, then wrap the "
            "module again"
          : "an earlier backward pass of this DistributedDataParallel failed "
            "for good; call destroy_process_group and init_process_group, then "
            "wrap the module again",
      group_->context("backward"));
}

void Transport::fail_for_good() {
  failed_ = true;
  group_->note_failure();
}

std::unique_ptr<Transport> make_transport(
    std::shared_ptr<distributed::Group> group,
    const std::vector<NamedTensor>& parameters,
    const DistributedDataParallelOptions& options) {
  const bool on_cpu =
      std::all_of(parameters.begin(), parameters.end(), [](const auto& named) {
        return named.tensor.is_cpu();
      });
  if (on_cpu && group->backend_name == "shm" && group->liveness) {
    return std::make_unique<ShmTransport>(
        std::move(group), parameters, options.arena);
  }
  return std::make_unique<C10dTransport>(
      std::move(group), parameters, options.bucket_cap_mb);
}

}  // namespace lockstep::nn
