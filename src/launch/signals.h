#pragma once

#include <optional>

#include "launch/pipe.h"

namespace lockstep::launcher {

/// Turns signals to this process into numbers that a loop reads: SIGINT,
/// SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2. Works in a process with threads.
/// Signals that the program handles or ignores itself are left alone, but a
/// shell without job control starts background commands with SIGINT and SIGQUIT
/// ignored: in the launcher's own process only an ignored SIGHUP (nohup)
/// counts. Restores at the end what is still its own. Only the first relay of a
/// process gets signals.
class SignalRelay {
 public:
  explicit SignalRelay(bool own_process);
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
