#include "comm/backends/gloo/process_group_gloo.h"

#ifndef USE_C10D_GLOO  // set by some builds of libtorch for their users
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "core/block_sigpipe.h"

namespace lockstep::comm::gloo {

c10::intrusive_ptr<c10d::Backend> make_process_group_gloo(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int world_size,
    std::chrono::milliseconds timeout,
    const std::vector<std::string>& interfaces,
    const std::string& address) {
  using c10d::ProcessGroupGloo;
  const BlockSigpipe block;  // in the threads that Gloo and c10d start here
  auto options = ProcessGroupGloo::Options::create(timeout);
  for (const auto& name : interfaces) {
    options->devices.push_back(
        ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (interfaces.empty()) {
    options->devices.push_back(
        ProcessGroupGloo::createDeviceForHostname(address));
  }
  return c10::make_intrusive<ProcessGroupGloo>(
      store, rank, world_size, std::move(options));
}

}  // namespace lockstep::comm::gloo
