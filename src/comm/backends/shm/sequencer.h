#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace lockstep::comm::shm {

/// Runs a backend's operations one at a time in the order of their calls: in
/// the caller where nothing else is under way, else on a thread that starts
/// when it is first needed. Thread safe.
class Sequencer {
 public:
  Sequencer() = default;
  ~Sequencer();
  Sequencer(const Sequencer&) = delete;
  Sequencer& operator=(const Sequencer&) = delete;

  /// Whether the caller may run an operation itself now; then it must call
  /// `leave` after it.
  [[nodiscard]] bool try_enter();
  void leave();

  /// Runs `job`, which does not throw, after everything queued before it.
  void queue(std::function<void()> job);

  /// Waits until everything queued has run, and ends the thread. Nothing may
  /// be queued afterwards.
  void finish();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool busy_ = false;
  bool finishing_ = false;
  std::thread thread_;
};

}  // namespace lockstep::comm::shm
