#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <optional>
#include <string>

#include "lockstep/core/export.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace lockstep {

/// Arguments of `init_process_group`, all optional. Mirrors
/// `torch.distributed.init_process_group`.
struct InitOptions {
  /// "hybrid" (shared memory where all ranks are on one host, else Gloo for
  /// everything), "shm", "gloo", or "mpi" (under mpirun; the module is loaded
  /// when it is asked for). Empty: `LOCKSTEP_BACKEND`, else "hybrid".
  std::string backend = {};
  /// "env://", "tcp://host:port" or "file:///path". Empty: "env://".
  std::string init_method = {};
  /// Bound of every wait of the group, and of the rendezvous.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Number of ranks; unset: from the environment or the URL.
  std::optional<int> world_size = {};
  /// Own rank; unset: from the environment or the URL.
  std::optional<int> rank = {};
  /// Send exactly what c10d sends, so that Python ranks can be members:
  /// Gloo, no checks between ranks. Unset: `LOCKSTEP_INTEROP`, else false.
  std::optional<bool> interop = {};
};

/// Joins the ranks of a job into the default group. Collective and blocking:
/// returns when all ranks are connected and their versions agree.
///
/// Without any variable or argument it makes a world of one. The group belongs
/// to the calling thread where `testing::run_ranks` made the thread a rank,
/// else to the process.
///
/// \throws InvalidArgument  wrong or missing settings (all named at once), a
///     rank outside the world, an unknown backend, a second call without
///     `destroy_process_group`
/// \throws TimeoutError  not all ranks arrived in time
/// \throws StoreError  the store cannot be reached or bound
/// \throws MismatchError  ranks run different versions of libtorch or Lockstep
///
/// Thread safety: call from one thread. Mirrors
/// `torch.distributed.init_process_group`.
LOCKSTEP_API void init_process_group(const InitOptions& options = {});

/// The same over a store that the caller made; `rank` and `world_size` must be
/// set. The group shares ownership of the store. One store serves one group;
/// for another one wrap it in a `c10d::PrefixStore`.
LOCKSTEP_API void init_process_group(c10::intrusive_ptr<c10d::Store> store,
                                     const InitOptions& options);

/// Says goodbye to the other ranks and frees the default group. Gradients and
/// tensors stay valid. Returns within a bound also after a failure. Does
/// nothing when there is no group.
///
/// A process that a rank forks has no group, and its end is no concern of the
/// others.
LOCKSTEP_API void destroy_process_group();

/// Whether the calling thread's rank has a default group. Never throws.
[[nodiscard]] LOCKSTEP_API bool is_initialized() noexcept;

/// Own rank in the default group; 0 without a group.
[[nodiscard]] LOCKSTEP_API int get_rank() noexcept;

/// Size of the default group; 1 without a group.
[[nodiscard]] LOCKSTEP_API int get_world_size() noexcept;

/// Own index among the ranks of this host; 0 without a group.
[[nodiscard]] LOCKSTEP_API int get_local_rank() noexcept;

/// Number of ranks on this host; 1 without a group.
[[nodiscard]] LOCKSTEP_API int get_local_world_size() noexcept;

/// Name of the default group's backend: "shm" or "gloo" where "hybrid" chose
/// between them, "self" where it did so in a world of one, else the name given.
/// \throws InvalidArgument without a group
[[nodiscard]] LOCKSTEP_API std::string get_backend();

/// The default group for use with c10d; include
/// `<torch/csrc/distributed/c10d/ProcessGroup.hpp>` to use it. Shared
/// ownership; after `destroy_process_group` its collectives throw.
/// \throws InvalidArgument without a group
[[nodiscard]] LOCKSTEP_API c10::intrusive_ptr<c10d::ProcessGroup> get_group();

/// The device of this rank: the CUDA device of its local rank where libtorch
/// has CUDA and one is there (it is made the current one), else the CPU.
[[nodiscard]] LOCKSTEP_API c10::Device device();

}  // namespace lockstep
