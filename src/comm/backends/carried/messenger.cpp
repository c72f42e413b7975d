#include "comm/backends/carried/messenger.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/backends/carried/carried_backend.h"
#include "comm/backends/carried/transport.h"
#include "comm/liveness.h"
#include "comm/p2p/verdicts.h"
#include "core/block_sigpipe.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::carried {
namespace {

using namespace std::chrono_literals;
using Kind = p2p::Frame::Kind;

/// What comes along with an offer.
constexpr size_t kPayload = 64 * 1024;
constexpr size_t kPayloadOfExactSizes = 4 * 1024;

/// Longest sleep of the watcher while something is pending, whose deadline may
/// be new.
constexpr std::chrono::milliseconds kNap = 500ms;

/// How long what a peer said before it left may be under way.
constexpr std::chrono::milliseconds kUnderWay = 500ms;

/// How long the last words to peers may take to leave.
constexpr std::chrono::milliseconds kLastWords = 1s;

/// Memory of the transfer's tensor, which lives as long as the result: a
/// carrier may use it after the transfer has ended with an error.
at::Tensor as_bytes(const void* data, size_t bytes, p2p::TransferPtr owner) {
  return at::from_blob(
      const_cast<void*>(data),
      {static_cast<int64_t>(bytes)},
      [kept = std::move(owner)](void*) {},
      at::kByte);
}

}  // namespace

CarriedMessenger::CarriedMessenger(c10::intrusive_ptr<c10d::Backend> carrier,
                                   std::shared_ptr<Liveness> liveness,
                                   std::shared_ptr<FirstFailure> failure,
                                   bool exact_sizes)
    : rank_(carrier->getRank()),
      size_(carrier->getSize()),
      exact_sizes_(exact_sizes),
      payload_(exact_sizes ? kPayloadOfExactSizes : kPayload),
      liveness_(std::move(liveness)),
      carrier_(std::move(carrier)),
      exchange_(
          rank_,
          size_,
          {.of_offer = payload_, .of_data = SIZE_MAX},
          [this](int rank) { return global_rank(rank); },
          [this,
           failure = std::move(failure)](const std::exception_ptr& error) {
            finishing_ ? p2p::warn(error) : failure->note(error);
          }),
      links_(static_cast<size_t>(size_)) {
  if (!liveness_) return;
  subscription_ = liveness_->subscribe([this] {
    const std::lock_guard lock(mutex_);
    due_.notify_one();
  });
}

CarriedMessenger::~CarriedMessenger() {
  finish();
  if (liveness_) liveness_->unsubscribe(subscription_);
}

int CarriedMessenger::global_rank(int rank) const {
  return liveness_ ? liveness_->global_rank(rank) : rank;
}

void CarriedMessenger::post(const p2p::TransferPtr& transfer) {
  if (finishing_) {
    throw InvalidArgument(
        "the group was destroyed; call init_process_group again",
        transfer->context());
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && transfer->peer().value_or(peer) == peer) open(peer);
  }
  if (!watcher_.joinable()) {
    const BlockSigpipe block;
    watcher_ = std::thread([this] { watch(); });
  }
  if (transfer->direction() == p2p::Direction::kSend) {
    exchange_.send(transfer);
  } else {
    exchange_.receive(transfer);
  }
  if (watcher_rests_) due_.notify_one();
}

void CarriedMessenger::start(const p2p::TransferPtr& transfer) {
  Lock lock(mutex_);
  post(transfer);
  flush(lock);
}

void CarriedMessenger::run(const p2p::TransferPtr& transfer) {
  start(transfer);
  wait(*transfer, kNoTimeout);
}

void CarriedMessenger::wait(const p2p::Transfer& transfer,
                            std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  ended_.wait_for(lock, limit > kNoTimeout ? limit : kLongestWait, [&] {
    return transfer.ended();
  });
}

void CarriedMessenger::open(int peer) {
  auto& link = links_[static_cast<size_t>(peer)];
  if (link) return;
  link = std::make_unique<Link>();
  const BlockSigpipe block;  // the carrier may write here, too
  link->thread = std::thread([this, peer] { listen(peer); });
}

void CarriedMessenger::listen(int peer) {
  // Two in turn, so that the next frame finds a place while one is taken in.
  std::array<at::Tensor, 2> buffers;
  for (auto& buffer : buffers) {
    buffer =
        at::empty({static_cast<int64_t>(sizeof(Header) + payload_)}, at::kByte);
  }
  Lock lock(mutex_);
  Link& link = *links_[static_cast<size_t>(peer)];
  const auto post_next = [&](size_t turn) {
    std::vector<at::Tensor> tensors = {buffers[turn % 2]};
    link.listening = carrier_->recv(tensors, peer, Transport::kFrames);
  };
  try {
    if (stopping_) return;
    post_next(0);
    for (size_t turn = 0; !stopping_; ++turn) {
      const auto work = link.listening;
      lock.unlock();
      const bool came = work->wait(kLongestWait);
      lock.lock();
      if (!came || stopping_) return;
      post_next(turn + 1);
      take_in(peer, buffers[turn % 2], lock);
      flush(lock);
    }
  } catch (const std::exception& e) {
    if (!lock.owns_lock()) lock.lock();
    lose(peer, e.what());
  }
}

void CarriedMessenger::take_in(int peer, const at::Tensor& bytes, Lock& lock) {
  Link& link = *links_[static_cast<size_t>(peer)];
  const char* data = static_cast<const char*>(bytes.data_ptr());
  Header header;
  std::memcpy(&header, data, sizeof header);
  const char* payload = data + sizeof header;
  ++link.received;
  for (; link.retired < header.received; ++link.retired) link.sent.pop_front();
  if (header.frame.kind == Kind::kData) {
    const auto rest = link.rests.extract(header.frame.message);
    if (rest.empty()) return;  // given up
    // It was sent before its frame, and may come later all the same.
    link.arriving = rest.mapped();
    lock.unlock();
    const bool came = rest.mapped()->wait(kLongestWait);
    lock.lock();
    link.arriving.reset();
    if (!came || stopping_) return;
    payload = exchange_.rest_of(peer, header.frame.message).data;
  }
  exchange_.accept(peer, header.frame, payload);
}

void CarriedMessenger::flush(Lock& lock) {
  for (int peer = 0; peer < size_; ++peer) {
    const auto& link = links_[static_cast<size_t>(peer)];
    try {
      while (link && !link->closed) {
        const auto outgoing = exchange_.next(peer);
        if (!outgoing) break;
        send(peer, *outgoing);
      }
    } catch (const std::exception& e) {
      lose(peer, e.what());
    }
  }
  ended_.notify_all();
  const auto transfers = exchange_.take_futures();
  if (transfers.empty()) return;
  lock.unlock();
  for (const auto& transfer : transfers) transfer->complete_future();
  lock.lock();
}

void CarriedMessenger::send(int peer, const p2p::Exchange::Outgoing& outgoing) {
  Link& link = *links_[static_cast<size_t>(peer)];
  const auto& [frame, payload] = outgoing;
  Sent sent;
  std::vector<at::Tensor> tensors(1);
  if (frame.kind == Kind::kGrant) {
    const auto rest = exchange_.rest_of(peer, frame.message);
    if (rest.bytes == 0) return;  // given up
    tensors[0] = as_bytes(
        rest.data, rest.bytes, exchange_.receive_of(peer, frame.message));
    link.rests[frame.message] =
        carrier_->recv(tensors, peer, Transport::kRests);
  }
  if (frame.kind == Kind::kData) {
    sent.data_of = exchange_.send_of(peer, frame.message);
    tensors[0] = as_bytes(payload, frame.bytes, sent.data_of);
    sent.works.push_back(carrier_->send(tensors, peer, Transport::kRests));
  }
  sent.refusal = frame.kind == Kind::kRefused;
  const size_t along = frame.kind == Kind::kOffer ? frame.bytes : 0;
  const Header header{frame, link.received};
  const size_t size = sizeof header + (exact_sizes_ ? payload_ : along);
  sent.frame = at::empty({static_cast<int64_t>(size)}, at::kByte);
  auto* data = static_cast<char*>(sent.frame.data_ptr());
  std::memcpy(data, &header, sizeof header);
  if (along > 0) std::memcpy(data + sizeof header, payload, along);
  tensors[0] = sent.frame;
  sent.works.push_back(carrier_->send(tensors, peer, Transport::kFrames));
  link.sent.push_back(std::move(sent));
}

void CarriedMessenger::lose(int peer, const char* reason) {
  Link& link = *links_[static_cast<size_t>(peer)];
  link.closed = true;
  if (link.verdict_by) return;
  link.loss = reason;
  link.verdict_by = Deadline(kVerdictTime);
  due_.notify_one();
}

void CarriedMessenger::watch() {
  Lock lock(mutex_);
  while (!stopping_) {
    watcher_rests_ = exchange_.pending() == 0;
    due_.wait_for(
        lock,
        watcher_rests_ ? kLongestWait : std::min(kNap, exchange_.until_due()));
    if (stopping_) return;
    end_what_is_due();
    flush(lock);
  }
}

bool CarriedMessenger::may_still_come(const p2p::Transfer& transfer) {
  bool may_come = false;
  for (int peer = 0; peer < size_; ++peer) {
    const auto& link = links_[static_cast<size_t>(peer)];
    if (!link || transfer.peer().value_or(peer) != peer) continue;
    if (!link->heard_by) link->heard_by = Deadline(kUnderWay);
    may_come |= !link->heard_by->passed();
  }
  return may_come;
}

void CarriedMessenger::end_what_is_due() {
  const auto close_with = [&](const p2p::Transfer& transfer,
                              std::exception_ptr error) {
    if (error && transfer.peer() && *transfer.peer() != rank_) {
      links_[static_cast<size_t>(*transfer.peer())]->closed = true;
    }
    return error;
  };
  if (liveness_ && liveness_->disturbed()) {
    const bool left_in_order = !liveness_->failure();
    exchange_.end_where([&](const p2p::Transfer& transfer) {
      const auto lost = p2p::loss(transfer, *liveness_);
      const bool wait = lost && left_in_order && may_still_come(transfer);
      return close_with(transfer, wait ? nullptr : lost);
    });
  }
  exchange_.end_where([&](const p2p::Transfer& transfer) {
    return close_with(transfer,
                      p2p::lateness(transfer, rank_, size_, [this](int rank) {
                        return global_rank(rank);
                      }));
  });
  for (int peer = 0; peer < size_; ++peer) {
    const auto& link = links_[static_cast<size_t>(peer)];
    if (!link || !link->closed) continue;
    if (!link->verdict_by) {
      end_with(peer, "an earlier message to or from it failed");
    } else if (link->verdict_by->passed()) {
      end_with(peer, "the connection failed: " + link->loss);
    }
    // Nothing may be written any more for those that have ended.
    std::erase_if(link->rests, [&](const auto& rest) {
      return exchange_.rest_of(peer, rest.first).bytes == 0;
    });
  }
}

void CarriedMessenger::end_with(int peer, const std::string& reason) {
  exchange_.end_where([&](const p2p::Transfer& transfer) -> std::exception_ptr {
    if (transfer.peer() != peer) return nullptr;
    auto context = transfer.context();
    context.peers = {global_rank(peer)};
    return std::make_exception_ptr(BackendError(
        "rank " + std::to_string(global_rank(peer)) + ": " + reason,
        std::move(context)));
  });
}

void CarriedMessenger::finish() {
  Lock lock(mutex_);
  if (!carrier_) return;
  finishing_ = true;
  exchange_.end_unmet_receives([](const p2p::Transfer& transfer) {
    return std::make_exception_ptr(BackendError(
        "the group was destroyed before a message came; wait for every "
        "receive before destroy_process_group",
        transfer.context()));
  });
  flush(lock);
  ended_.wait(lock, [&] { return exchange_.pending() == 0; });
  std::vector<WorkPtr> last_words;
  for (const auto& link : links_) {
    if (!link || link->closed) continue;
    for (const auto& sent : link->sent) {
      last_words.insert(last_words.end(), sent.works.begin(), sent.works.end());
    }
  }
  lock.unlock();
  try {
    for (const auto& work : last_words) work->wait(kLastWords);
  } catch (const std::exception&) {
    // Whatever happens is no concern of a rank that leaves.
  }
  lock.lock();
  // A connection that is closed on a peer may take along what it has not read.
  const Deadline heard_by(kLastWords);
  while (!heard_by.passed() && is_refusal_unheard()) {
    ended_.wait_for(lock, 5ms);
  }
  let_go(lock);
}

bool CarriedMessenger::is_refusal_unheard() const {
  if (stopping_) return false;
  for (int peer = 0; peer < size_; ++peer) {
    const auto& link = links_[static_cast<size_t>(peer)];
    if (!link || link->closed) continue;
    if (liveness_ && liveness_->has_left(peer)) continue;
    for (const auto& sent : link->sent) {
      if (sent.refusal) return true;
    }
  }
  return false;
}

void CarriedMessenger::abort(const std::string& reason) {
  Lock lock(mutex_);
  if (!carrier_) return;
  finishing_ = true;
  exchange_.end_where([&](const p2p::Transfer& transfer) {
    return std::make_exception_ptr(BackendError(reason, transfer.context()));
  });
  flush(lock);
  let_go(lock);
}

void CarriedMessenger::let_go(Lock& lock) {
  if (stopping_) {  // another thread does it
    ended_.wait(lock, [&] { return !carrier_; });
    return;
  }
  stopping_ = true;
  due_.notify_one();
  for (const auto& link : links_) {
    if (!link) continue;
    for (const auto& work : {link->listening, link->arriving}) {
      if (work) work->abort();
    }
  }
  std::vector<std::thread> threads;
  for (const auto& link : links_) {
    if (link) threads.push_back(std::move(link->thread));
  }
  threads.push_back(std::move(watcher_));
  lock.unlock();
  for (auto& thread : threads) {
    if (thread.joinable()) thread.join();
  }
  lock.lock();
  links_.clear();
  carrier_.reset();
  ended_.notify_all();
}

}  // namespace lockstep::comm::carried
