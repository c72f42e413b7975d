// Sends and receives over a carrier that brings each part when the test says.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backends/carried/messenger.h"
#include "comm/backends/carried/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::carried {
namespace {

using namespace std::chrono_literals;
using p2p::Direction;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// What two ranks have sent to each other.
struct Mail {
  using Key = std::array<int, 2>;  // receiver, tag

  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, std::deque<at::Tensor>> sent;
  bool holds_rests = false;
};

class ReceiveWork final : public c10d::Work {
 public:
  ReceiveWork(std::shared_ptr<Mail> mail, Mail::Key key, at::Tensor to)
      : mail_(std::move(mail)), key_(key), to_(std::move(to)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mail_->mutex);
    auto& sent = mail_->sent[key_];
    const bool held = key_[1] == Transport::kRests;
    const bool came = mail_->changed.wait_for(lock, timeout, [&] {
      return aborted_ || (!sent.empty() && !(held && mail_->holds_rests));
    });
    if (!came || aborted_) return false;
    to_.narrow(0, 0, sent.front().numel()).copy_(sent.front());
    sent.pop_front();
    return true;
  }
  void abort() override {
    const std::lock_guard lock(mail_->mutex);
    aborted_ = true;
    mail_->changed.notify_all();
  }

 private:
  const std::shared_ptr<Mail> mail_;
  const Mail::Key key_;
  const at::Tensor to_;
  bool aborted_ = false;
};

class SentWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

class MailCarrier final : public c10d::Backend {
 public:
  MailCarrier(std::shared_ptr<Mail> mail, int rank)
      : Backend(rank, 2), mail_(std::move(mail)) {}

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    const std::lock_guard lock(mail_->mutex);
    mail_->sent[{peer, tag}].push_back(tensors[0].clone());
    mail_->changed.notify_all();
    return c10::make_intrusive<SentWork>();
  }
  WorkPtr recv(Tensors& tensors, int /*peer*/, int tag) override {
    return c10::make_intrusive<ReceiveWork>(
        mail_, Mail::Key{getRank(), tag}, tensors[0]);
  }

 private:
  const std::shared_ptr<Mail> mail_;
};

class TwoRanks : public ::testing::Test {
 protected:
  TwoRanks() {
    for (int rank = 0; rank < 2; ++rank) {
      messengers_.push_back(std::make_shared<CarriedMessenger>(
          c10::make_intrusive<MailCarrier>(mail_, rank),
          nullptr,
          std::make_shared<FirstFailure>(),
          /*exact_sizes=*/false));
    }
  }
  ~TwoRanks() override {
    for (const auto& messenger : messengers_) messenger->abort("the end");
  }

  p2p::TransferPtr start(int rank,
                         Direction direction,
                         const at::Tensor& tensor,
                         int tag,
                         std::chrono::milliseconds timeout = 30s) {
    auto transfer = c10::make_intrusive<p2p::Transfer>(
        messengers_[static_cast<size_t>(rank)],
        ErrorContext{.rank = rank},
        direction,
        tensor,
        1 - rank,
        tag,
        timeout);
    messengers_[static_cast<size_t>(rank)]->start(transfer);
    return transfer;
  }
  void hold_rests(bool hold) {
    const std::lock_guard lock(mail_->mutex);
    mail_->holds_rests = hold;
    mail_->changed.notify_all();
  }

 private:
  const std::shared_ptr<Mail> mail_ = std::make_shared<Mail>();
  std::vector<std::shared_ptr<CarriedMessenger>> messengers_;
};

constexpr int64_t kLong = 1 << 18;

TEST_F(TwoRanks, ARestThatComesAfterItsFrameIsWaitedFor) {
  hold_rests(true);
  const auto to = torch::zeros({kLong}, torch::kLong);
  const auto sent = start(1, Direction::kSend, torch::arange(kLong), 3);
  const auto received = start(0, Direction::kReceive, to, 3);
  EXPECT_THROW(received->wait(200ms), TimeoutError);
  hold_rests(false);
  received->wait();
  sent->wait();
  EXPECT_TRUE(to.equal(torch::arange(kLong)));
}

TEST_F(TwoRanks, ARestThatDoesNotComeHoldsUpNoDeadline) {
  hold_rests(true);
  const auto sent = start(1, Direction::kSend, torch::ones({kLong}), 3);
  const auto received =
      start(0, Direction::kReceive, torch::zeros({kLong}), 3, 300ms);
  EXPECT_THROW(received->wait(), TimeoutError);
}

}  // namespace
}  // namespace lockstep::comm::carried
