#include "comm/backends/mpi/module/message.h"

#include <algorithm>
#include <stdexcept>

#include "comm/backends/mpi/module/messages.h"
#include "core/clock.h"

namespace lockstep::comm::mpi {
namespace {

using namespace std::chrono_literals;

// MPI can only be asked again and again whether a message has come: without a
// pause at first, then at intervals of an eighth of the time waited so far, and
// so seldom in the end that a long wait leaves the processor to others. A pause
// is a sleep; who only yields the processor gets it back last.
constexpr auto kBusy = 20us;
constexpr std::chrono::nanoseconds kShortestPause = 10us;
constexpr std::chrono::nanoseconds kLongestPause = 2ms;

std::chrono::nanoseconds pause_after(Clock::duration waited) {
  return std::clamp(
      std::chrono::nanoseconds(waited / 8), kShortestPause, kLongestPause);
}

}  // namespace

Message::Message(c10d::OpType type,
                 at::Tensor tensor,
                 int peer,
                 int tag,
                 std::shared_ptr<Messages> messages)
    : Work(-1, type),
      tensor_(std::move(tensor)),
      messages_(std::move(messages)),
      tag_(tag),
      peer_(peer) {
}

bool Message::isCompleted() {
  try {
    messages_->progress();
  } catch (...) {
    end(std::current_exception());
  }
  return has_ended();
}

bool Message::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout == kNoTimeout ? kLongestWait : timeout);
  const auto start = Clock::now();
  for (;;) {
    messages_->progress();
    const auto waited = Clock::now() - start;
    std::unique_lock lock(mutex_);
    if (exception_) std::rethrow_exception(exception_);
    if (completed_) return true;
    if (std::exchange(aborted_, false)) return false;
    if (deadline.passed()) {
      throw std::runtime_error("Timed out waiting for a message");
    }
    if (waited < kBusy) continue;
    cv_.wait_for(lock,
                 std::min<std::chrono::nanoseconds>(pause_after(waited),
                                                    deadline.remaining()),
                 [this] { return completed_ || aborted_; });
  }
}

void Message::end(const std::exception_ptr& error) {
  if (!has_ended()) finish(error);
}

void Message::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  cv_.notify_all();
}

}  // namespace lockstep::comm::mpi
