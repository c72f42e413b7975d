#include "comm/backends/carried/watched_store.h"

#include <thread>

#include "core/clock.h"

namespace lockstep::comm::carried {

WatchedStore::WatchedStore(std::string prefix,
                           c10::intrusive_ptr<c10d::Store> store,
                           std::shared_ptr<Liveness> liveness,
                           std::chrono::milliseconds timeout,
                           ErrorContext context)
    : PrefixStore(std::move(prefix), std::move(store)),
      liveness_(std::move(liveness)),
      timeout_(timeout),
      context_(std::move(context)) {
  for (int rank = 0; rank < liveness_->world_size(); ++rank) {
    if (rank != liveness_->rank()) peers_.push_back(rank);
  }
}

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<uint8_t>> WatchedStore::multiGet(
    const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

void WatchedStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void WatchedStore::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  const Deadline deadline(timeout);
  while (!check(keys)) {
    if (auto lost = liveness_->peer_lost(peers_, context_)) throw *lost;
    if (deadline.passed()) {
      ErrorContext context = context_;
      context.elapsed = deadline.elapsed();
      throw TimeoutError(
          "not all ranks came to connect; one of them may be stopped", context);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace lockstep::comm::carried
