#include "nn/transport.h"

#include <algorithm>

#include "comm/liveness.h"
#include "distributed/group.h"
#include "nn/c10d_transport.h"
#include "nn/shm_transport.h"

namespace lockstep::nn {

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
