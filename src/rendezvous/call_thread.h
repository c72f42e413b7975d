#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <type_traits>

#include "core/clock.h"

namespace lockstep::rendezvous {

/// A thread for calls that know no deadline, so that the caller can give up on
/// one. It takes no signals, and its writes to sockets end with EPIPE.
///
/// Thread safety: one caller at a time.
class CallThread {
 public:
  CallThread();
  ~CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  /// Runs `call`, which must hold all that it uses, and returns its result. At
  /// `deadline` and a moment it gives up: the future is not valid, and the
  /// thread is left to itself. Later calls are given up at once.
  template <class F>
  std::future<std::invoke_result_t<F>> run(F call, const Deadline& deadline) {
    using Task = std::packaged_task<std::invoke_result_t<F>()>;
    auto task = std::make_shared<Task>(std::move(call));
    auto result = task->get_future();
    if (!thread_.joinable()) return {};
    post([task = std::move(task)] { (*task)(); });
    if (result.wait_for(deadline.remaining() + kGrace) ==
        std::future_status::ready) {
      return result;
    }
    abandon();
    return {};
  }

 private:
  /// Calls that know of the deadline, too, end first: their errors say more.
  static constexpr std::chrono::milliseconds kGrace{1000};

  struct Queue;
  void post(std::function<void()> task);
  void abandon() noexcept;

  std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace lockstep::rendezvous
