#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/nn/reducer.h"

namespace lockstep::distributed {
struct Group;
}

namespace lockstep::nn {

/// Copies a module's buffers from rank 0 to all ranks in one message.
class BufferSync {
 public:
  BufferSync(std::shared_ptr<distributed::Group> group,
             const std::vector<NamedTensor>& buffers);

  /// Collective. Writes past autograd's version counters: a graph of an earlier
  /// forward stays valid, as batch normalisation's own update leaves it.
  void broadcast();

 private:
  void check_not_converted() const;

  std::shared_ptr<distributed::Group> group_;
  std::vector<NamedTensor> buffers_;
  at::Tensor message_;             ///< bytes
  std::vector<at::Tensor> parts_;  ///< of `message_`, one like each buffer
};

}  // namespace lockstep::nn
