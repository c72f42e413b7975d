#include "lockstep/core/error.h"

namespace lockstep {
namespace {

std::string with_prefix(const std::string& message, const ErrorContext& c) {
  std::string text;
  if (!c.backend.empty() || c.rank >= 0) {
    text += '[';
    text += c.backend.empty() ? "lockstep" : c.backend;
    if (c.rank >= 0) {
      text += " rank " + std::to_string(c.rank);
      if (c.world_size > 0) text += '/' + std::to_string(c.world_size);
    }
    text += "] ";
  }
  if (!c.operation.empty()) {
    text += c.operation;
    if (c.sequence) text += " #" + std::to_string(*c.sequence);
    if (!c.group.empty()) text += " on group \"" + c.group + '"';
    text += ": ";
  }
  text += message;
  if (c.elapsed) {
    text += " (after " + std::to_string(c.elapsed->count()) + " ms)";
  }
  return text;
}

}  // namespace

Error::Error(const std::string& message, ErrorContext context)
    : std::runtime_error(with_prefix(message, context)),
      context_(std::move(context)),
      message_(message) {
}

BackendError::BackendError(const std::string& message,
                           ErrorContext context,
                           int code)
    : Error(message, std::move(context)), code_(code) {
}

LaunchError::LaunchError(const std::string& message,
                         ErrorContext context,
                         int exit_code)
    : Error(message, std::move(context)), exit_code_(exit_code) {
}

Error::~Error() = default;
InvalidArgument::~InvalidArgument() = default;
Unsupported::~Unsupported() = default;
TimeoutError::~TimeoutError() = default;
PeerLost::~PeerLost() = default;
MismatchError::~MismatchError() = default;
StoreError::~StoreError() = default;
BackendError::~BackendError() = default;
CheckpointError::~CheckpointError() = default;
LaunchError::~LaunchError() = default;

}  // namespace lockstep
