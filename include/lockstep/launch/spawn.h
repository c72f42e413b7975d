#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "lockstep/core/export.h"
#include "lockstep/launch/serializer.h"

namespace lockstep {

/// The place of a spawned function's process in the job.
struct LaunchContext {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< among the processes of this host
  int local_world_size = 1;  ///< processes of this host
};

/// Arguments of `spawn`. Mirrors `torch.multiprocessing.spawn`.
struct SpawnOptions {
  /// Number of processes.
  int nprocs = 1;
  /// Wait for their end. False: `spawn` returns at once, `SpawnContext::join`
  /// waits.
  bool join = true;
  /// Time between asking processes to stop and killing them.
  std::chrono::milliseconds grace = std::chrono::seconds(30);
  /// Bound of the whole run. Unset: none.
  std::optional<std::chrono::milliseconds> timeout = {};
};

class SpawnContext;

namespace detail {

/// What `spawn` needs to know of its arguments, without their types.
struct SpawnCall {
  /// The same in parent and child when they are the same call.
  std::string signature;
  std::function<std::string()> serialize;
  std::function<void(const LaunchContext&, std::string_view)> invoke;
};

LOCKSTEP_API SpawnContext spawn(const SpawnOptions& options,
                                const SpawnCall& call);

template <class T, class... Others>
inline constexpr bool is_one_of = (std::is_same_v<T, Others> || ...);

/// The type in which an argument travels: a text as std::string.
template <class T>
using Sent = std::conditional_t<
    is_one_of<std::decay_t<T>, const char*, char*, std::string_view>,
    std::string,
    std::decay_t<T>>;

}  // namespace detail

/// The processes of one `spawn`. Mirrors `torch.multiprocessing`'s
/// `SpawnContext`. Move only; not thread safe. The destructor stops processes
/// that still run and waits for their end, at most the grace time.
class LOCKSTEP_API SpawnContext {
 public:
  /// A run that is over.
  SpawnContext();
  ~SpawnContext();
  SpawnContext(SpawnContext&&) noexcept;
  SpawnContext& operator=(SpawnContext&&) noexcept;

  /// Blocks until all processes ended (true) or the time is over (false).
  /// Without an argument it waits as long as `SpawnOptions::timeout` allows.
  /// \throws LaunchError  as `spawn` does
  bool join(std::optional<std::chrono::milliseconds> timeout = {});

  /// Joins; always 0, so that `main` can return the call of `spawn`.
  operator int();

 private:
  friend SpawnContext detail::spawn(const SpawnOptions&,
                                    const detail::SpawnCall&);
  class State;
  explicit SpawnContext(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Whether this process was started by `spawn`. Code before the call of `spawn`
/// runs in it as well. Thread safe.
[[nodiscard]] LOCKSTEP_API bool is_spawned_child();

/// Runs `fn(const LaunchContext&, args...)` in `options.nprocs` processes of
/// this host and waits for them. Mirrors `torch.multiprocessing.spawn`.
///
/// A process runs this program again, with the same arguments, up to this call
/// of `spawn`; there it gets the arguments that the caller gave (by value, see
/// `Serializer`), runs `fn` and leaves with `std::exit(0)`. So code before the
/// call runs in every process (`is_spawned_child` tells), and calls of `spawn`
/// before this one do nothing there. Threads and locks of the caller are no
/// concern: nothing is a plain fork. Each process gets torchrun's environment
/// variables, so that `init_process_group()` needs no arguments.
///
/// In a process that a launcher started (lockstep run, torchrun, mpirun, srun)
/// nothing is started: `fn` runs here, as the launcher's rank, and `nprocs` is
/// the launcher's. Its exceptions leave `spawn` as they are.
///
/// An exception in `fn` is printed as `[rank R/W] text` and ends the process
/// with 1; the others then get SIGTERM and, after the grace time, SIGKILL.
/// Signals to the caller are handled as `launch` does; after SIGINT, SIGTERM,
/// SIGHUP or SIGQUIT the caller then ends by that signal. When the caller
/// dies, even by SIGKILL, the processes and their children are killed.
///
/// \throws InvalidArgument  nprocs below 1, a call inside a spawned function,
/// or
///     SIGCHLD is ignored
/// \throws LaunchError  a process failed: `context().peers` names its rank, the
///     text is its exception's; or it ended without reaching this call
/// \throws TimeoutError  `options.timeout` is over
///
/// Thread safety: the first call must come at the same place in every run of
/// the program, so call from one thread.
template <class Function, class... Args>
SpawnContext spawn(Function&& fn,
                   const SpawnOptions& options = {},
                   Args&&... args) {
  using Values = std::tuple<detail::Sent<Args>...>;
  static_assert(
      std::is_invocable_v<Function&,
                          const LaunchContext&,
                          detail::Sent<Args>...>,
      "spawn calls fn(const LaunchContext&, args...): fn does not take these");
  const auto serialize = [&] {
    ByteWriter writer;
    (Serializer<detail::Sent<Args>>::write(writer, args), ...);
    return writer.bytes();
  };
  const auto invoke = [&](const LaunchContext& context,
                          std::string_view bytes) {
    ByteReader reader(bytes);
    // Braces evaluate in order.
    Values values{Serializer<detail::Sent<Args>>::read(reader)...};
    std::apply(
        [&](auto&... value) { std::invoke(fn, context, std::move(value)...); },
        values);
  };
  const auto signature =
      std::string(typeid(Function).name()) + '(' + typeid(Values).name() + ')';
  return detail::spawn(options, {signature, serialize, invoke});
}

}  // namespace lockstep
