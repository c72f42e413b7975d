#include "lockstep/distributed/monitored_barrier.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/store_texts.h"
#include "core/clock.h"
#include "distributed/call.h"
#include "distributed/convert_error.h"
#include "distributed/group.h"
#include "lockstep/core/error.h"
#include "rendezvous/bounded_store.h"

namespace lockstep {
namespace {

using distributed::Group;

constexpr const char* kOperation = "monitored_barrier";
/// How much longer than the bound a rank waits for what the first one says, and
/// for a store that keeps silent.
constexpr std::chrono::milliseconds kGrace{1'000};

/// One barrier of a group with liveness. Ranks are global ones.
class MonitoredBarrier {
 public:
  MonitoredBarrier(Group& group, std::chrono::milliseconds timeout)
      : group_(group),
        timeout_(timeout),
        number_(group.monitored_barriers++),
        deadline_(timeout) {}

  void run() {
    limit_store(timeout_ + kGrace);
    comm::set_text(*store_,
                   arrival_of(group_.global_rank),
                   std::to_string(timeout_.count()));
    if (group_.rank == 0) {
      wait_for_all();
    } else {
      heed_verdict();
    }
  }

 private:
  static std::string key(int number, const std::string& what) {
    return "lockstep/monitored_barrier/" + std::to_string(number) + '/' + what;
  }
  [[nodiscard]] std::string arrival_of(int rank) const {
    return key(number_, std::to_string(rank));
  }
  [[nodiscard]] std::string verdict() const { return key(number_, "verdict"); }

  void wait_for_all() {
    std::string missing;
    std::optional<TimeoutError> late;
    try {
      comm::texts_of(
          *store_,
          group_.ranks,
          [&](int rank) { return arrival_of(rank); },
          deadline_,
          [&] { look(); });
    } catch (const TimeoutError& error) {
      missing = distributed::list_of(error.context().peers);
      late.emplace(failure(missing, error.context().peers));
    }
    comm::set_text(*store_, verdict(), missing);
    if (late) throw *late;
    forget_last();
  }

  /// All have come here, so nobody reads of the barrier before any more.
  void forget_last() {
    comm::with_store([&] {
      for (const int rank : group_.ranks) {
        store_->deleteKey(key(number_ - 1, std::to_string(rank)));
      }
      store_->deleteKey(key(number_ - 1, "verdict"));
    });
  }

  /// Calls of the store end then, even if its server is stopped.
  void limit_store(std::chrono::milliseconds limit) {
    store_ = c10::make_intrusive<rendezvous::BoundedStore>(
        group_.store, Deadline(limit + kGrace), group_.context(kOperation));
  }

  /// The first rank's bound counts from when it came.
  void heed_verdict() {
    const auto first = group_.ranks[0];
    const auto bound = comm::texts_of(
        *store_,
        {first},
        [&](int rank) { return arrival_of(rank); },
        Deadline(timeout_ + kGrace),
        [&] { look(); })[0];
    const auto limit = std::chrono::milliseconds(std::stoll(bound)) + kGrace;
    limit_store(limit);
    const auto key_of = [&](int) { return verdict(); };
    const auto missing = comm::texts_of(
        *store_, {first}, key_of, Deadline(limit), [&] { look(); })[0];
    if (missing.empty()) return;
    std::vector<int> ranks;
    std::istringstream numbers(missing);
    for (std::string number; std::getline(numbers, number, ',');) {
      ranks.push_back(std::stoi(number));
    }
    throw failure(missing, ranks);
  }

  /// Throws when a rank that has not come is lost, or the first one without a
  /// verdict.
  void look() const {
    if (!group_.liveness->disturbed() || store_->check({verdict()})) return;
    std::vector<int> awaited;
    for (int rank = 0; rank < group_.world_size; ++rank) {
      const int global = group_.ranks[static_cast<size_t>(rank)];
      if (!store_->check({arrival_of(global)})) awaited.push_back(rank);
    }
    if (awaited.empty() && group_.rank != 0) awaited = {0};
    auto lost = group_.liveness->peer_lost(awaited, group_.context(kOperation));
    if (lost) throw *lost;
  }

  [[nodiscard]] TimeoutError failure(const std::string& missing,
                                     const std::vector<int>& ranks) const {
    auto context = group_.context(kOperation);
    context.peers = ranks;
    context.elapsed = deadline_.elapsed();
    return TimeoutError("rank " + missing +
                            " did not come in time; look at its own output, "
                            "and where it is instead",
                        std::move(context));
  }

  Group& group_;
  const std::chrono::milliseconds timeout_;
  const int number_;
  const Deadline deadline_;
  c10::intrusive_ptr<c10d::Store> store_;
};

void run_c10ds_own(c10d::Backend& backend, std::chrono::milliseconds timeout) {
  c10d::BarrierOptions options;
  options.timeout = timeout;
  backend.monitoredBarrier(options, /*waitAllRanks=*/true);
}

}  // namespace

void monitored_barrier(const MonitoredBarrierOptions& options) {
  const distributed::Call call(
      kOperation, options.group, options.timeout, /*async_op=*/false);
  if (!call.is_member() || call.group().world_size == 1) return;
  const auto group = distributed::require_group(options.group, kOperation);
  const auto timeout =
      std::min(options.timeout.value_or(group->timeout), kLongestWait);
  try {
    if (group->liveness) {
      MonitoredBarrier(*group, timeout).run();
    } else {
      run_c10ds_own(*group->backend, timeout);
    }
  } catch (...) {
    group->note_failure();
    distributed::rethrow_converted(group->context(kOperation));
  }
}

}  // namespace lockstep
