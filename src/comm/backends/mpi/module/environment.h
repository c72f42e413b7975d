#pragma once

#include <mpi.h>

#include <mutex>
#include <string>
#include <vector>

#include "comm/backends/mpi/module/module.h"

namespace lockstep::comm::mpi {

/// Throws std::runtime_error with MPI's own text unless `code` is MPI_SUCCESS.
void check(int code, const char* call);

/// The right to call MPI, which one thread has at a time: so
/// MPI_THREAD_SERIALIZED is enough. False when another thread kept it for long,
/// in a call that blocks. Throws std::runtime_error when MPI was given up or
/// finalised.
class Turn {
 public:
  Turn();
  explicit operator bool() const { return lock_.owns_lock(); }

 private:
  std::unique_lock<std::timed_mutex> lock_;
};

/// The same, waits until it comes.
Turn await_turn();

/// See Module.
World start();
std::vector<std::string> exchange(const std::string& text);
void give_up() noexcept;

/// A process did not answer in time: the end of this one does not wait for it
/// for ever.
void expect_one_stopped() noexcept;

}  // namespace lockstep::comm::mpi
