#include "comm/backends/mpi/mpi_backend.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "comm/backends/carried/carried_backend.h"
#include "comm/backends/carried/watched_store.h"
#include "comm/backends/mpi/load_module.h"
#include "comm/liveness.h"
#include "core/block_signals.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::mpi {
namespace {

using namespace std::chrono_literals;

std::atomic<size_t> longest_part = size_t{1} << 30;

class WatchedPeers final : public Peers {
 public:
  explicit WatchedPeers(std::shared_ptr<const Liveness> liveness)
      : liveness_(std::move(liveness)) {}

  [[nodiscard]] bool ended(int rank) const override {
    if (!liveness_->disturbed()) return false;
    if (liveness_->has_left(rank)) return true;
    const auto failure = liveness_->failure();
    return failure && failure->rank == rank;
  }
  [[nodiscard]] bool failed() const override {
    return liveness_->failure().has_value();
  }
  [[nodiscard]] bool timed_out() const override {
    return liveness_->timed_out({}).has_value();
  }
  [[nodiscard]] int global_rank(int rank) const override {
    return liveness_->global_rank(rank);
  }

 private:
  const std::shared_ptr<const Liveness> liveness_;
};

/// Runs a call of MPI that blocks without a deadline on a thread of its own.
/// `watch` is asked meanwhile and throws to give up, as the deadline does; then
/// MPI is given up, too.
template <class Call, class Watch>
auto run_watched(Call call,
                 const Watch& watch,
                 const Deadline& deadline,
                 ErrorContext context) {
  using Task = std::packaged_task<std::invoke_result_t<Call>()>;
  auto task = std::make_shared<Task>(std::move(call));
  auto result = task->get_future();
  {
    const BlockSignals block;
    std::thread([task] { (*task)(); }).detach();
  }
  try {
    while (result.wait_for(5ms) != std::future_status::ready) {
      watch();
      if (deadline.passed()) {
        context.elapsed = deadline.elapsed();
        throw TimeoutError(
            "not all processes of the MPI job came to this call; let all of "
            "them make it, or raise the timeout",
            context);
      }
    }
  } catch (const Error&) {
    load_module().give_up();
    throw;
  }
  try {
    return result.get();
  } catch (const std::invalid_argument& error) {
    throw InvalidArgument(error.what(), context);
  } catch (const std::exception& error) {
    throw BackendError(error.what(), context);
  }
}

World start(const Deadline& deadline, const ErrorContext& context) {
  Module& module = load_module();
  return run_watched(
      [&module] { return module.start(); }, [] {}, deadline, context);
}

/// Each rank's place in MPI_COMM_WORLD.
std::vector<int> exchange_world_ranks(c10d::Store& store,
                                      const BackendContext& context,
                                      int own,
                                      const ErrorContext& error) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < context.world_size; ++rank) {
    keys.push_back("world_rank/" + std::to_string(rank));
  }
  store.set(keys[context.rank], std::to_string(own));
  std::vector<int> result;
  for (const auto& value : store.multiGet(keys)) {
    result.push_back(std::stoi(std::string(value.begin(), value.end())));
    const auto first = std::find(result.begin(), result.end(), result.back());
    if (first + 1 == result.end()) continue;
    throw InvalidArgument(
        "ranks " + std::to_string(first - result.begin()) + " and " +
            std::to_string(result.size() - 1) + " are both rank " +
            std::to_string(result.back()) +
            " of MPI_COMM_WORLD; start all ranks as processes of one job: "
            "mpirun -n " +
            std::to_string(context.world_size) + " ./program",
        error);
  }
  return result;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_carrier(const BackendContext& context) {
  const ErrorContext error = context.error_context("mpi");
  const auto& liveness = context.liveness;
  const World world = start(context.created_by, error);
  carried::WatchedStore store(
      "mpi", context.store, liveness, context.created_by.remaining(), error);
  Members members = {
      .rank = context.rank,
      .world_ranks = exchange_world_ranks(store, context, world.rank, error),
      .peers = std::make_shared<WatchedPeers>(liveness),
      .longest_part = longest_part};
  std::vector<int> everyone(context.world_size);
  std::iota(everyone.begin(), everyone.end(), 0);
  return run_watched(
      [members = std::move(members)] { return load_module().connect(members); },
      [&] {
        if (auto lost = liveness->peer_lost(everyone, error)) throw *lost;
      },
      context.created_by,
      error);
}

c10::intrusive_ptr<c10d::Backend> create(const BackendContext& context) {
  return carried::make_carried_backend(
      "mpi", context, make_carrier(context), kExactSizes);
}

rendezvous::Assigned assigned(const Deadline& deadline) {
  const ErrorContext context = {.operation = "init_process_group",
                                .backend = "mpi"};
  const World world = start(deadline, context);
  return {.rank = world.rank,
          .world_size = world.size,
          .source = world.size > 1
                        ? "MPI_COMM_WORLD"
                        : "MPI_COMM_WORLD, where a process that mpirun did not "
                          "start is alone",
          .exchange = [=](const std::string& text) {
            return run_watched([text] { return load_module().exchange(text); },
                               [] {},
                               deadline,
                               context);
          }};
}

void set_longest_part(size_t bytes) {
  longest_part = bytes;
}

}  // namespace lockstep::comm::mpi
