#include "comm/backends/shm/sequencer.h"

#include <pthread.h>

namespace lockstep::comm::shm {

Sequencer::~Sequencer() {
  finish();
}

bool Sequencer::try_enter() {
  const std::lock_guard lock(mutex_);
  if (busy_ || !jobs_.empty()) return false;
  busy_ = true;
  return true;
}

void Sequencer::leave() {
  const std::lock_guard lock(mutex_);
  busy_ = false;
  if (thread_.joinable()) changed_.notify_all();
}

void Sequencer::queue(std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  if (thread_.joinable()) {
    changed_.notify_all();
  } else {
    thread_ = std::thread([this] { work(); });
    ::pthread_setname_np(thread_.native_handle(), "lockstep-shm");
  }
}

void Sequencer::finish() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Sequencer::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock,
                  [&] { return !busy_ && (finishing_ || !jobs_.empty()); });
    if (jobs_.empty()) return;
    const auto job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    job();
    lock.lock();
    busy_ = false;
  }
}

}  // namespace lockstep::comm::shm
