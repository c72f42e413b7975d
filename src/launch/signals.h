#pragma once

#include <optional>

#include "launch/pipe.h"

namespace lockstep::launcher {

/// Turns signals to this process into numbers that a loop reads: SIGINT,
/// SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2. Works in a process with threads.
/// Signals that the program handles itself, and a SIGHUP that is ignored
/// (nohup), are left alone. Restores everything at the end. Only the first
/// relay of a process gets signals.
class SignalRelay {
 public:
  SignalRelay();
  ~SignalRelay();
  SignalRelay(const SignalRelay&) = delete;
  SignalRelay& operator=(const SignalRelay&) = delete;

  /// Readable when a signal is there.
  [[nodiscard]] int fd() const { return pipe_.read_end.get(); }
  /// The next signal, if there is one.
  std::optional<int> next();

 private:
  Pipe pipe_;
};

/// Default handling of what a relay of the parent handles. For a child between
/// fork and exec; async-signal-safe.
void reset_relayed_signals() noexcept;

}  // namespace lockstep::launcher
