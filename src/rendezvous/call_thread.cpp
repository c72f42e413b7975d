#include "rendezvous/call_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>

#include "core/block_signals.h"

namespace lockstep::rendezvous {

struct CallThread::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool closed = false;

  void close() {
    const std::lock_guard lock(mutex);
    closed = true;
    tasks.clear();
    changed.notify_one();
  }

  void work_off() {
    for (;;) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return closed || !tasks.empty(); });
      if (closed) return;
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
    }
  }
};

CallThread::CallThread() : queue_(std::make_shared<Queue>()) {
  const BlockSignals block;
  thread_ = std::thread([queue = queue_] {
    ::pthread_setname_np(::pthread_self(), "lockstep-call");
    queue->work_off();
  });
}

CallThread::~CallThread() {
  queue_->close();
  if (thread_.joinable()) thread_.join();
}

void CallThread::abandon() noexcept {
  queue_->close();
  if (thread_.joinable()) thread_.detach();
}

void CallThread::post(std::function<void()> task) {
  const std::lock_guard lock(queue_->mutex);
  queue_->tasks.push_back(std::move(task));
  queue_->changed.notify_one();
}

}  // namespace lockstep::rendezvous
