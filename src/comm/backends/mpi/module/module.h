#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

// What the library and the module, liblockstep_mpi.so, know of each other. Only
// the module uses MPI, and it uses nothing else of the library.

namespace lockstep::comm::mpi {

/// This process's place in MPI_COMM_WORLD.
struct World {
  int rank = 0;
  int size = 1;
};

/// What the module asks about the ranks of a group, from any thread.
class Peers {
 public:
  virtual ~Peers() = default;
  /// Whether the rank has left or died. MPI does not tell.
  [[nodiscard]] virtual bool ended(int rank) const = 0;
  /// Whether one of them died or failed.
  [[nodiscard]] virtual bool failed() const = 0;
  /// Whether one of them, or this rank, waited for another in vain.
  [[nodiscard]] virtual bool timed_out() const = 0;
  /// The number that errors name a rank of the group by.
  [[nodiscard]] virtual int global_rank(int rank) const = 0;
};

/// Longest text that is exchanged.
inline constexpr size_t kLongestText = 1023;

/// What a group's backend is made from.
struct Members {
  int rank = 0;
  std::vector<int> world_ranks;  ///< by rank in the group
  std::shared_ptr<const Peers> peers;
  /// A message of more bytes goes in parts: MPI counts by int.
  size_t longest_part = 0;
};

/// Errors are std::invalid_argument for what the program must change, else
/// std::runtime_error.
///
/// Thread safety: all members.
class Module {
 public:
  virtual ~Module() = default;

  /// Initialises MPI for MPI_THREAD_SERIALIZED, and finalises it as the process
  /// ends; or takes it as the program has initialised it. Collective over
  /// MPI_COMM_WORLD the first time. Blocks without a deadline.
  virtual World start() = 0;

  /// Gives each process the texts of all. Collective over MPI_COMM_WORLD.
  /// Blocks without a deadline.
  virtual std::vector<std::string> exchange(const std::string& text) = 0;

  /// Send, recv and recvAnysource among the members and nothing else. Works
  /// must be waited for. `shutdown` says that all members are done. Collective
  /// over the members. Blocks without a deadline.
  virtual c10::intrusive_ptr<c10d::Backend> connect(const Members& members) = 0;

  /// From now on no call of MPI is made in this process, not even to finalise
  /// it.
  virtual void give_up() noexcept = 0;
};

/// The one function of the module: null when its version is not `version`.
using GetModule = Module*(const char* version);
inline constexpr const char* kGetModule = "lockstep_mpi_module";

}  // namespace lockstep::comm::mpi
