#pragma once

#include <csignal>

namespace lockstep {

/// Keeps all signals from the threads that the calling thread starts meanwhile:
/// they are for the user's threads.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &former_);
  }
  ~BlockSignals() { ::pthread_sigmask(SIG_SETMASK, &former_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t former_{};
};

}  // namespace lockstep
