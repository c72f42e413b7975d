#pragma once

#include <string>

#include "core/fd.h"

namespace lockstep::launcher {

/// The file that TORCHELASTIC_ERROR_FILE names: a worker that fails writes its
/// error there, Python's under `@record` for one. It lives in memory and leaves
/// nothing behind.
class ErrorFile {
 public:
  ErrorFile();

  /// A name under which the worker can open it.
  [[nodiscard]] std::string path() const;
  /// The message in what was written; empty when there is none.
  [[nodiscard]] std::string message() const;

 private:
  Fd fd_;
};

/// The text of the innermost "message" of torchrun's error format,
/// `{"message": {"message": "ValueError: ...", ...}}`, or of
/// `{"message": "..."}`; empty when there is none.
std::string error_message(const std::string& json);

}  // namespace lockstep::launcher
