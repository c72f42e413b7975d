#include "distributed/lifetime.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <vector>

#include "comm/blame.h"
#include "core/failure.h"
#include "distributed/group.h"
#include "lockstep/core/log.h"
#include "lockstep/distributed/process_group.h"
#include "rendezvous/open_stores.h"

namespace lockstep::distributed {
namespace {

std::atomic<pid_t> owner = 0;

void at_exit() {
  if (::getpid() != owner) return;  // a forked child: the peers are not its own
  try {
    destroy_process_group();
    rendezvous::close_stores();
  } catch (const std::exception& e) {
    log::error(std::string("at exit: ") + e.what());
  }
}

}  // namespace

void end_with_process() {
  owner = ::getpid();
  std::atexit(at_exit);
  set_failure_hook(fail_default_group);
}

void fail_default_group(const std::string& reason) {
  const auto whole = default_group();
  if (!whole || !whole->liveness) return;
  std::vector<std::shared_ptr<Group>> groups = {whole};
  {
    const std::lock_guard lock(whole->sub_groups.mutex);
    const auto& alive = whole->sub_groups.alive;
    groups.insert(groups.end(), alive.begin(), alive.end());
  }
  for (const auto& group : groups) {
    if (!group->liveness) continue;  // of one rank
    comm::announce_current_exception(*group->liveness, reason);
    group->backend->abort();
  }
}

void wait_for_goodbyes(comm::Liveness& liveness,
                       std::chrono::milliseconds bound) {
  std::mutex mutex;
  std::condition_variable changed;
  const auto all_left = [&] {
    if (liveness.failure()) return true;
    for (int rank = 0; rank < liveness.world_size(); ++rank) {
      if (rank != liveness.rank() && !liveness.has_left(rank)) return false;
    }
    return true;
  };
  bool done = false;
  const auto id = liveness.subscribe([&] {
    if (!all_left()) return;
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_one();
  });
  {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, bound, [&] { return done; });
  }
  liveness.unsubscribe(id);
}

}  // namespace lockstep::distributed
