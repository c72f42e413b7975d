#include "distributed/lifetime.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "distributed/group.h"
#include "lockstep/core/log.h"
#include "lockstep/distributed/process_group.h"
#include "rendezvous/rendezvous.h"

namespace lockstep::distributed {
namespace {

pid_t owner = 0;
std::terminate_handler previous_handler = nullptr;

void at_exit() {
  if (::getpid() != owner) return;  // a forked child: the peers are not its own
  try {
    destroy_process_group();
    rendezvous::close_stores();
  } catch (const std::exception& e) {
    log::error(std::string("at exit: ") + e.what());
  }
}

void announce_uncaught(const std::string& text) {
  log::error("uncaught exception: " + text);
  const auto group = default_group();
  if (group && group->liveness) group->liveness->announce_failure(text);
}

void at_terminate() {
  if (const auto error = std::current_exception();
      error && ::getpid() == owner) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      announce_uncaught(e.what());
    } catch (...) {
      announce_uncaught("no std::exception");
    }
  }
  if (previous_handler) previous_handler();
  std::abort();
}

}  // namespace

void tie_to_process() {
  static std::once_flag once;
  std::call_once(once, [] {
    owner = ::getpid();
    std::atexit(at_exit);
    previous_handler = std::set_terminate(at_terminate);
  });
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
