#include "comm/liveness/registry.h"

#include <pthread.h>

#include <cstdlib>
#include <mutex>
#include <set>

#include "comm/liveness/watcher.h"

namespace lockstep::comm::liveness {
namespace {

struct Registry {
  std::mutex mutex;
  std::set<Watcher*> watchers;

  Registry();
};

Registry& registry() {
  // Never destroyed: groups may live longer than statics.
  static auto* const instance = new Registry;
  return *instance;
}

Registry::Registry() {
  std::atexit([] { visit_registry([](Watcher& w) { w.end_with_process(); }); });
  ::pthread_atfork([] { registry().mutex.lock(); },
                   [] { registry().mutex.unlock(); },
                   [] {
                     for (auto* watcher : registry().watchers) {
                       watcher->close_in_forked_child();
                     }
                     registry().mutex.unlock();
                   });
}

}  // namespace

void add_to_registry(Watcher& watcher) {
  const std::lock_guard lock(registry().mutex);
  registry().watchers.insert(&watcher);
}

void remove_from_registry(Watcher& watcher) {
  const std::lock_guard lock(registry().mutex);
  registry().watchers.erase(&watcher);
}

void visit_registry(const std::function<void(Watcher&)>& visit) {
  const std::lock_guard lock(registry().mutex);
  for (auto* watcher : registry().watchers) visit(*watcher);
}

}  // namespace lockstep::comm::liveness
