#pragma once

#include <optional>
#include <string>

#include "core/clock.h"
#include "core/fd.h"

namespace lockstep::launcher {

/// What a worker wrote about its end.
struct RecordedError {
  std::string message = {};
  bool consequence = false;  ///< another rank's end is the cause
  std::optional<Clock::time_point> time = {};  ///< unset: it did not say when
};

/// Writes why this process ends into the file that its launcher named in
/// TORCHELASTIC_ERROR_FILE, if any, so that torchrun can read it as well.
void record_error(const std::string& message, bool consequence) noexcept;

/// The file that TORCHELASTIC_ERROR_FILE names: a worker that fails writes its
/// error there, Python's under `@record` for one. It lives in memory and leaves
/// nothing behind.
class ErrorFile {
 public:
  ErrorFile();

  /// A name under which the worker can open it.
  [[nodiscard]] std::string path() const;
  /// What was written; without a message when there is none.
  [[nodiscard]] RecordedError read() const;

 private:
  Fd fd_;
};

/// The text of the innermost "message" of torchrun's error format,
/// `{"message": {"message": "ValueError: ...", ...}}`, or of
/// `{"message": "..."}`; empty when there is none.
std::string error_message(const std::string& json);

}  // namespace lockstep::launcher
