#pragma once

#include <csignal>

namespace lockstep {

/// Keeps SIGPIPE from the calling thread, and for good from the threads that it
/// starts meanwhile: libtorch writes to sockets without MSG_NOSIGNAL, and a
/// peer that died would end the process. Such a write fails with EPIPE instead.
class BlockSigpipe {
 public:
  BlockSigpipe();
  /// Drops a SIGPIPE that came meanwhile.
  ~BlockSigpipe();
  BlockSigpipe(const BlockSigpipe&) = delete;
  BlockSigpipe& operator=(const BlockSigpipe&) = delete;

 private:
  sigset_t former_;
};

}  // namespace lockstep
