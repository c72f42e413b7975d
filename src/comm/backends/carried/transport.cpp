#include "comm/backends/carried/transport.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>

namespace lockstep::comm::carried {
namespace {

using namespace std::chrono_literals;

std::vector<at::Tensor> as_tensor(const Transport::Message& message) {
  return {at::from_blob(
      message.data, {static_cast<int64_t>(message.bytes)}, at::kByte)};
}

/// Whether the message arrived, now that the exchange is lost.
bool arrived(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    return work && work->wait(1ms);
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

void Transport::exchange(Channel channel,
                         const std::vector<Message>& receives,
                         const std::vector<Message>& sends,
                         const Deadline& deadline,
                         const std::function<bool()>& give_up) {
  std::vector<Pending> posted;
  for (const auto* messages : {&receives, &sends}) {
    for (const auto& message : *messages) {
      if (message.bytes > 0) posted.push_back({message.peer, nullptr});
    }
  }
  std::string error;
  size_t done = 0;
  try {
    auto next = posted.begin();
    for (const auto& message : receives) {
      if (message.bytes == 0) continue;
      auto tensor = as_tensor(message);
      (next++)->work = carrier_->recv(tensor, message.peer, channel);
    }
    for (const auto& message : sends) {
      if (message.bytes == 0) continue;
      auto tensor = as_tensor(message);
      (next++)->work = carrier_->send(tensor, message.peer, channel);
    }
    {
      const std::lock_guard lock(mutex_);
      pending_ = posted;
    }
    if (give_up()) error = "interrupted";
    while (error.empty() && done < posted.size()) {
      if (posted[done].work->wait(std::max(1ms, deadline.remaining()))) {
        ++done;
      } else if (give_up()) {
        error = "interrupted";
      }
    }
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = e.what();
  }
  {
    const std::lock_guard lock(mutex_);
    pending_.clear();
  }
  if (error.empty()) return;

  std::vector<int> missing;
  for (size_t i = done; i < posted.size(); ++i) {
    const int peer = posted[i].peer;
    if (std::find(missing.begin(), missing.end(), peer) == missing.end() &&
        !arrived(posted[i].work)) {
      missing.push_back(peer);
    }
  }
  std::sort(missing.begin(), missing.end());
  throw ExchangeError(error, std::move(missing));
}

void Transport::interrupt() {
  const std::lock_guard lock(mutex_);
  for (const auto& pending : pending_) pending.work->abort();
}

void Transport::close() {
  carrier_.reset();
}

}  // namespace lockstep::comm::carried
