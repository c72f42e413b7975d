#pragma once

#include <chrono>

namespace gloo {

namespace transport {
class UnboundBuffer;
}  // namespace transport

// Only pointers to it exist on our side; its layout is libtorch's affair.
class Context {
 public:
  Context() = delete;

  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
