#include "comm/p2p/self_messenger.h"

#include <algorithm>
#include <utility>

#include "comm/p2p/verdicts.h"

namespace lockstep::comm::p2p {

SelfMessenger::SelfMessenger(GlobalRank global_rank)
    : global_rank_(std::move(global_rank)),
      exchange_(0, 1, {0, 0}, global_rank_, [](const std::exception_ptr&) {}) {
}

void SelfMessenger::start(const TransferPtr& transfer) {
  std::unique_lock lock(mutex_);
  if (transfer->direction() == Direction::kSend) {
    exchange_.send(transfer);
  } else {
    exchange_.receive(transfer);
  }
  ended_.notify_all();
  const auto transfers = exchange_.take_futures();
  lock.unlock();
  for (const auto& ended : transfers) ended->complete_future();
}

void SelfMessenger::run(const TransferPtr& transfer) {
  start(transfer);
  wait(*transfer, kNoTimeout);
}

void SelfMessenger::wait(const Transfer& transfer,
                         std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  const auto left = transfer.deadline().remaining();
  ended_.wait_for(lock, limit > kNoTimeout ? std::min(limit, left) : left, [&] {
    return transfer.ended();
  });
  exchange_.end_where([&](const Transfer& pending) {
    return &pending == &transfer ? lateness(pending, 0, 1, global_rank_)
                                 : nullptr;
  });
  const auto transfers = exchange_.take_futures();
  lock.unlock();
  for (const auto& ended : transfers) ended->complete_future();
}

void SelfMessenger::finish() {
  std::unique_lock lock(mutex_);
  exchange_.end_where([](const Transfer& transfer) {
    return std::make_exception_ptr(BackendError(
        "the group was destroyed before the other side of this was called",
        transfer.context()));
  });
  ended_.notify_all();
  const auto transfers = exchange_.take_futures();
  lock.unlock();
  for (const auto& ended : transfers) ended->complete_future();
}

}  // namespace lockstep::comm::p2p
