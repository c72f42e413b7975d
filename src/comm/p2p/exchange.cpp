#include "comm/p2p/exchange.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace lockstep::comm::p2p {
namespace {

/// Bytes of messages without a receive that a rank keeps in all.
constexpr size_t kMostKept = 4 * 1024 * 1024;

std::string elements(uint64_t numel, uint8_t dtype) {
  return std::to_string(numel) +
         (numel == 1 ? " element of " : " elements of ") +
         c10::toString(static_cast<c10::ScalarType>(dtype));
}

bool fits(const Transfer& receive, int peer, int tag) {
  return receive.tag() == tag && receive.peer().value_or(peer) == peer;
}

Frame frame_about(const Transfer& transfer,
                  Frame::Kind kind,
                  uint64_t message) {
  return {.message = message,
          .numel = transfer.numel(),
          .tag = transfer.tag(),
          .kind = kind,
          .dtype = static_cast<uint8_t>(transfer.dtype())};
}

bool same_elements(const Frame& a, const Frame& b) {
  return a.numel == b.numel && a.dtype == b.dtype;
}

void copy(char* to, const char* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

Exchange::Exchange(int rank,
                   int size,
                   Payload payload,
                   GlobalRank global_rank,
                   std::function<void(const std::exception_ptr&)> on_error)
    : rank_(rank),
      payload_(payload),
      global_rank_(std::move(global_rank)),
      on_error_(std::move(on_error)),
      peers_(static_cast<size_t>(size)) {
}

void Exchange::send(const TransferPtr& transfer) {
  Peer& peer = peers_[static_cast<size_t>(*transfer->peer())];
  const uint64_t message = peer.messages++;
  ++pending_;
  peer.sends.emplace(message, Send{transfer});
  if (*transfer->peer() == rank_) {
    arrive(rank_,
           frame_about(*transfer, Frame::Kind::kOffer, message),
           transfer->data());
  } else {
    peer.to_offer.push_back(message);
  }
}

void Exchange::receive(const TransferPtr& transfer) {
  ++pending_;
  const auto offer =
      std::find_if(offers_.begin(), offers_.end(), [&](const Offer& o) {
        return fits(*transfer, o.peer, o.frame.tag);
      });
  if (offer == offers_.end()) {
    posted_.push_back(transfer);
    return;
  }
  const Offer met = std::move(*offer);
  offers_.erase(offer);
  kept_bytes_ -= met.kept.size();
  Frame frame = met.frame;
  frame.bytes = met.kept.size();
  meet(met.peer, frame, met.kept.data(), transfer);
}

std::optional<Exchange::Outgoing> Exchange::next(int to) {
  Peer& peer = peers_[static_cast<size_t>(to)];
  if (!peer.replies.empty()) {
    const Frame frame = peer.replies.front();
    peer.replies.pop_front();
    --unsaid_;
    return Outgoing{frame, nullptr};
  }
  while (!peer.to_offer.empty()) {
    const uint64_t message = peer.to_offer.front();
    peer.to_offer.pop_front();
    const auto found = peer.sends.find(message);
    if (found == peer.sends.end()) continue;  // given up
    const Transfer& transfer = *found->second.transfer;
    Frame frame = frame_about(transfer, Frame::Kind::kOffer, message);
    frame.bytes = std::min(transfer.bytes(), payload_.of_offer);
    return Outgoing{frame, transfer.data()};
  }
  while (!peer.granted.empty()) {
    const uint64_t message = peer.granted.front();
    const auto found = peer.sends.find(message);
    if (found == peer.sends.end()) {
      peer.granted.pop_front();
      continue;
    }
    Send& send = found->second;
    const size_t left = send.transfer->bytes() - send.sent;
    Frame frame{.message = message,
                .offset = send.sent,
                .bytes = std::min(left, payload_.of_data),
                .kind = Frame::Kind::kData};
    send.sent += frame.bytes;
    if (frame.bytes == left) peer.granted.pop_front();
    return Outgoing{frame, send.transfer->data() + frame.offset};
  }
  return std::nullopt;
}

void Exchange::accept(int from, const Frame& frame, const char* payload) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  switch (frame.kind) {
    case Frame::Kind::kOffer:
      arrive(from, frame, payload);
      break;
    case Frame::Kind::kGrant:
      grant(peer, frame);
      break;
    case Frame::Kind::kData:
      write(peer, frame, payload);
      break;
    case Frame::Kind::kTaken:
      finish_send(peer, frame.message, nullptr);
      break;
    case Frame::Kind::kRefused: {
      const auto found = peer.sends.find(frame.message);
      if (found == peer.sends.end()) break;
      const Transfer& transfer = *found->second.transfer;
      finish_send(
          peer,
          frame.message,
          mismatch(transfer,
                   rank_,
                   from,
                   frame_about(transfer, Frame::Kind::kOffer, frame.message),
                   frame));
      break;
    }
  }
}

void Exchange::reply(Peer& peer, const Frame& frame) {
  peer.replies.push_back(frame);
  ++unsaid_;
}

void Exchange::arrive(int from, const Frame& offer, const char* payload) {
  const auto receive =
      std::find_if(posted_.begin(), posted_.end(), [&](const auto& posted) {
        return fits(*posted, from, offer.tag);
      });
  if (receive != posted_.end()) {
    const TransferPtr transfer = std::move(*receive);
    posted_.erase(receive);
    meet(from, offer, payload, transfer);
    return;
  }
  Offer waiting{from, offer, {}};
  // The own tensor stays where it is.
  if (from != rank_ && kept_bytes_ + offer.bytes <= kMostKept) {
    waiting.kept.assign(payload, payload + offer.bytes);
    kept_bytes_ += offer.bytes;
  }
  offers_.push_back(std::move(waiting));
}

/// `payload`: the first `offer.bytes` bytes.
void Exchange::meet(int from,
                    const Frame& offer,
                    const char* payload,
                    const TransferPtr& transfer) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  transfer->set_peer(from);
  const Frame own =
      frame_about(*transfer, Frame::Kind::kRefused, offer.message);
  if (!same_elements(offer, own)) {
    end(transfer, mismatch(*transfer, from, rank_, offer, own));
    if (from == rank_) {
      accept(rank_, own, nullptr);
    } else {
      reply(peer, own);
    }
    return;
  }
  if (from == rank_) {
    const auto send = peer.sends.find(offer.message);
    copy(transfer->data(), send->second.transfer->data(), transfer->bytes());
    end(transfer, nullptr);
    finish_send(peer, offer.message, nullptr);
    return;
  }
  copy(transfer->data(), payload, offer.bytes);
  if (offer.bytes == transfer->bytes()) {
    reply(peer, {.message = offer.message, .kind = Frame::Kind::kTaken});
    end(transfer, nullptr);
    return;
  }
  peer.receives.emplace(offer.message, Receive{transfer, offer.bytes});
  ++flowing_;
  reply(peer,
        {.message = offer.message,
         .offset = offer.bytes,
         .kind = Frame::Kind::kGrant});
}

void Exchange::grant(Peer& peer, const Frame& frame) {
  const auto found = peer.sends.find(frame.message);
  if (found == peer.sends.end()) return;  // given up
  found->second.sent = frame.offset;
  found->second.granted = true;
  ++flowing_;
  peer.granted.push_back(frame.message);
}

void Exchange::write(Peer& peer, const Frame& frame, const char* payload) {
  const auto found = peer.receives.find(frame.message);
  if (found == peer.receives.end()) return;  // given up
  Receive& receive = found->second;
  copy(receive.transfer->data() + frame.offset, payload, frame.bytes);
  receive.received += frame.bytes;
  if (receive.received < receive.transfer->bytes()) return;
  reply(peer, {.message = frame.message, .kind = Frame::Kind::kTaken});
  end(receive.transfer, nullptr);
  peer.receives.erase(found);
  --flowing_;
}

Exchange::Rest Exchange::rest_of(int from, uint64_t message) const {
  const auto& receives = peers_[static_cast<size_t>(from)].receives;
  const auto found = receives.find(message);
  if (found == receives.end()) return {nullptr, 0};
  const auto& [transfer, received] = found->second;
  return {transfer->data() + received, transfer->bytes() - received};
}

TransferPtr Exchange::receive_of(int from, uint64_t message) const {
  const auto& receives = peers_[static_cast<size_t>(from)].receives;
  const auto found = receives.find(message);
  return found == receives.end() ? nullptr : found->second.transfer;
}

TransferPtr Exchange::send_of(int to, uint64_t message) const {
  const auto& sends = peers_[static_cast<size_t>(to)].sends;
  const auto found = sends.find(message);
  return found == sends.end() ? nullptr : found->second.transfer;
}

void Exchange::finish_send(Peer& peer,
                           uint64_t message,
                           std::exception_ptr error) {
  const auto found = peer.sends.find(message);
  if (found == peer.sends.end()) return;  // given up
  if (found->second.granted) --flowing_;
  end(found->second.transfer, std::move(error));
  peer.sends.erase(found);
}

void Exchange::end(const TransferPtr& transfer, std::exception_ptr error) {
  --pending_;
  if (error) on_error_(error);
  if (transfer->end(std::move(error))) futures_.push_back(transfer);
}

std::exception_ptr Exchange::mismatch(const Transfer& own,
                                      int sender,
                                      int receiver,
                                      const Frame& sent,
                                      const Frame& expected) const {
  ErrorContext context = own.context();
  context.peers = {global_rank_(sender == rank_ ? receiver : sender)};
  return std::make_exception_ptr(MismatchError(
      "rank " + std::to_string(global_rank_(sender)) + " sends " +
          elements(sent.numel, sent.dtype) + " with tag " +
          std::to_string(sent.tag) + " to rank " +
          std::to_string(global_rank_(receiver)) + ", which expects " +
          elements(expected.numel, expected.dtype) +
          "; send and receive the same number of elements of one dtype",
      std::move(context)));
}

std::chrono::milliseconds Exchange::until_due() const {
  auto first = kLongestWait;
  const auto consider = [&](const TransferPtr& transfer) {
    first = std::min(first, transfer->deadline().remaining());
  };
  for (const auto& transfer : posted_) consider(transfer);
  for (const auto& peer : peers_) {
    for (const auto& [message, send] : peer.sends) consider(send.transfer);
    for (const auto& [message, receive] : peer.receives) {
      consider(receive.transfer);
    }
  }
  return first;
}

void Exchange::end_unmet_receives(const Verdict& verdict) {
  std::erase_if(posted_, [&](const TransferPtr& transfer) {
    const auto error = verdict(*transfer);
    if (error) end(transfer, error);
    return error != nullptr;
  });
}

void Exchange::end_where(const Verdict& verdict) {
  const auto ends = [&](const TransferPtr& transfer) {
    const auto error = verdict(*transfer);
    if (error) end(transfer, error);
    return error != nullptr;
  };
  std::erase_if(posted_, ends);
  for (auto& peer : peers_) {
    std::erase_if(peer.receives, [&](const auto& entry) {
      if (!ends(entry.second.transfer)) return false;
      --flowing_;
      return true;
    });
    std::erase_if(peer.sends, [&](const auto& entry) {
      if (!ends(entry.second.transfer)) return false;
      if (entry.second.granted) --flowing_;
      return true;
    });
  }
  // What this rank offered itself and gave up is no offer any more.
  std::erase_if(offers_, [&](const Offer& offer) {
    return offer.peer == rank_ &&
           !peers_[static_cast<size_t>(rank_)].sends.contains(
               offer.frame.message);
  });
}

}  // namespace lockstep::comm::p2p
