#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/core/export.h"

namespace lockstep {

/// What was going on when an error arose. Every field is optional: the ones
/// that are known appear in the error's text.
struct ErrorContext {
  std::string operation = {};   ///< "all_reduce", "init_process_group"
  std::string group = {};       ///< group name, "world" by default
  std::string backend = {};     ///< "shm", "gloo", ...
  int rank = -1;                ///< own global rank
  int world_size = 0;           ///< number of global ranks
  std::vector<int> peers = {};  ///< global ranks that the error is about
  std::optional<uint64_t> sequence = {};  ///< number of the collective, from 1
  std::optional<std::chrono::milliseconds> elapsed = {};  ///< time waited
};

/// Base of all errors that Lockstep throws. `what()` reads
/// `[shm rank 1/4] all_reduce #17 on group "world": <message>`.
///
/// Thread safety: immutable after construction.
class LOCKSTEP_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ErrorContext context = {});
  ~Error() override;

  [[nodiscard]] const ErrorContext& context() const noexcept {
    return context_;
  }
  /// The text without the bracketed prefix.
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  ErrorContext context_;
  std::string message_;
};

/// An argument, a setting or an environment variable is wrong.
class LOCKSTEP_API InvalidArgument : public Error {
 public:
  using Error::Error;
  ~InvalidArgument() override;
};

/// The call is right but not available: not built, or not possible on this
/// backend, device or dtype.
class LOCKSTEP_API Unsupported : public Error {
 public:
  using Error::Error;
  ~Unsupported() override;
};

/// A wait reached its deadline. `context().peers` names who did not arrive.
class LOCKSTEP_API TimeoutError : public Error {
 public:
  using Error::Error;
  ~TimeoutError() override;
};

/// A rank died, failed or left while others needed it. `context().peers`
/// names it; all survivors name the same one.
class LOCKSTEP_API PeerLost : public Error {
 public:
  using Error::Error;
  ~PeerLost() override;
};

/// Ranks disagree: other operation, shape, dtype, model or version.
class LOCKSTEP_API MismatchError : public Error {
 public:
  using Error::Error;
  ~MismatchError() override;
};

/// The rendezvous store cannot be reached or does not answer.
class LOCKSTEP_API StoreError : public Error {
 public:
  using Error::Error;
  ~StoreError() override;
};

/// A vendor library (Gloo, MPI, NCCL) or the operating system failed.
class LOCKSTEP_API BackendError : public Error {
 public:
  explicit BackendError(const std::string& message,
                        ErrorContext context = {},
                        int code = 0);
  ~BackendError() override;

  /// The vendor's or the system's own error code (errno for system calls).
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

/// A checkpoint file cannot be read or written, or is malformed.
class LOCKSTEP_API CheckpointError : public Error {
 public:
  using Error::Error;
  ~CheckpointError() override;
};

/// A process could not be started, or a started one failed.
/// `context().peers` names the rank, `exit_code()` its status.
class LOCKSTEP_API LaunchError : public Error {
 public:
  explicit LaunchError(const std::string& message,
                       ErrorContext context = {},
                       int exit_code = 1);
  ~LaunchError() override;

  /// The failed worker's own code, or 128 + signal number.
  [[nodiscard]] int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

}  // namespace lockstep
