#include "core/block_sigpipe.h"

#include <ctime>

namespace lockstep {
namespace {

sigset_t only_sigpipe() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

}  // namespace

BlockSigpipe::BlockSigpipe() {
  const sigset_t set = only_sigpipe();
  ::pthread_sigmask(SIG_BLOCK, &set, &former_);
}

BlockSigpipe::~BlockSigpipe() {
  if (sigismember(&former_, SIGPIPE) == 1) return;
  const sigset_t set = only_sigpipe();
  const timespec now{};
  while (::sigtimedwait(&set, nullptr, &now) == SIGPIPE) {
  }
  ::pthread_sigmask(SIG_SETMASK, &former_, nullptr);
}

}  // namespace lockstep
