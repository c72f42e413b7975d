// Which receive takes which message, without anything that carries frames.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/p2p/exchange.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::p2p {
namespace {

using namespace std::chrono_literals;

constexpr size_t kPayload = 64;

at::Tensor values(int from, int64_t numel, at::ScalarType dtype = at::kFloat) {
  return (torch::arange(numel, torch::kLong) * 3 + from * 100)
      .remainder(127)
      .to(dtype);
}

/// Ranks whose frames go over when `deliver` says so.
class Ranks {
 public:
  explicit Ranks(int n) {
    for (int rank = 0; rank < n; ++rank) {
      exchanges_.push_back(std::make_unique<Exchange>(
          rank,
          n,
          Exchange::Payload{kPayload, kPayload},
          [](int r) { return r; },
          [this](const std::exception_ptr&) { ++errors; }));
    }
  }

  Exchange& operator[](int rank) { return *exchanges_.at(rank); }

  TransferPtr send(int from, int to, const at::Tensor& tensor, int tag = 0) {
    auto transfer = make(from, Direction::kSend, tensor, to, tag);
    (*this)[from].send(transfer);
    return transfer;
  }
  TransferPtr receive(int rank,
                      std::optional<int> from,
                      const at::Tensor& tensor,
                      int tag = 0) {
    auto transfer = make(rank, Direction::kReceive, tensor, from, tag);
    (*this)[rank].receive(transfer);
    return transfer;
  }

  /// One frame, if there is one; its kind.
  std::optional<Frame::Kind> deliver_one(int from, int to) {
    const auto outgoing = (*this)[from].next(to);
    if (!outgoing) return std::nullopt;
    const auto [frame, payload] = *outgoing;
    const std::vector<char> bytes(payload, payload + frame.bytes);
    (*this)[to].accept(from, frame, bytes.data());
    return frame.kind;
  }
  /// All frames of all ranks.
  void deliver() {
    const int n = static_cast<int>(exchanges_.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (int from = 0; from < n; ++from) {
        for (int to = 0; to < n; ++to) {
          if (from == to) continue;
          while (deliver_one(from, to)) moved = true;
        }
      }
    }
  }

  int errors = 0;

 private:
  TransferPtr make(int rank,
                   Direction direction,
                   const at::Tensor& tensor,
                   std::optional<int> peer,
                   int tag) {
    return c10::make_intrusive<Transfer>(
        nullptr,
        ErrorContext{
            .operation = direction == Direction::kSend ? "send" : "recv",
            .rank = rank},
        direction,
        tensor,
        peer,
        tag,
        60s);
  }

  std::vector<std::unique_ptr<Exchange>> exchanges_;
};

void expect_done(const TransferPtr& transfer) {
  ASSERT_TRUE(transfer->ended());
  EXPECT_TRUE(transfer->isSuccess());
}

template <class E>
std::string error_of(const TransferPtr& transfer) {
  try {
    transfer->wait(1ms);
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another error: " << e.what();
  }
  return "none";
}

TEST(Exchange, AnySizeWhicheverSideComesFirst) {
  for (const int64_t numel : {0, 1, 15, 16, 17, 1000}) {
    for (const bool send_first : {true, false}) {
      Ranks ranks(2);
      const auto to = torch::zeros({numel});
      TransferPtr send;
      TransferPtr receive;
      if (send_first) {
        send = ranks.send(0, 1, values(0, numel));
        ranks.deliver();
        EXPECT_FALSE(send->ended());
        receive = ranks.receive(1, 0, to);
      } else {
        receive = ranks.receive(1, 0, to);
        ranks.deliver();
        send = ranks.send(0, 1, values(0, numel));
      }
      ranks.deliver();
      expect_done(send);
      expect_done(receive);
      EXPECT_TRUE(to.equal(values(0, numel))) << numel;
      EXPECT_TRUE(ranks[0].idle() && ranks[1].idle());
      EXPECT_FALSE(ranks[0].flowing() || ranks[1].flowing());
    }
  }
}

TEST(Exchange, MessagesOfOneTagKeepTheirOrder) {
  Ranks ranks(2);
  std::vector<at::Tensor> to;
  std::vector<TransferPtr> all;
  for (int i = 0; i < 6; ++i) {
    // Long and short ones in turn.
    all.push_back(ranks.send(0, 1, values(i, i % 2 == 0 ? 100 : 3)));
    if (i == 2) ranks.deliver();
  }
  for (int i = 0; i < 6; ++i) {
    to.push_back(torch::zeros({i % 2 == 0 ? 100 : 3}));
    all.push_back(ranks.receive(1, 0, to[i]));
  }
  ranks.deliver();
  for (const auto& transfer : all) expect_done(transfer);
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(to[i].equal(values(i, to[i].numel()))) << i;
  }
}

TEST(Exchange, TagsMeetInAnyOrder) {
  Ranks ranks(2);
  const auto a = ranks.send(0, 1, values(1, 500), 7);
  const auto b = ranks.send(0, 1, values(2, 500), 8);
  ranks.deliver();
  const auto to_b = torch::zeros({500});
  const auto receive_b = ranks.receive(1, 0, to_b, 8);
  ranks.deliver();
  expect_done(receive_b);
  expect_done(b);
  EXPECT_FALSE(a->ended());
  const auto to_a = torch::zeros({500});
  expect_done(([&] {
    auto receive = ranks.receive(1, 0, to_a, 7);
    ranks.deliver();
    return receive;
  })());
  EXPECT_TRUE(to_a.equal(values(1, 500)));
  EXPECT_TRUE(to_b.equal(values(2, 500)));
}

TEST(Exchange, AReceiveFromAnyRankTakesTheFirstThatFits) {
  Ranks ranks(3);
  ranks.send(2, 0, values(2, 4), 1);
  ranks.deliver();
  ranks.send(1, 0, values(1, 4));
  ranks.deliver();
  ranks.send(2, 0, values(3, 4));
  ranks.deliver();
  const auto first = torch::zeros({4});
  const auto second = torch::zeros({4});
  const auto one = ranks.receive(0, std::nullopt, first);
  const auto two = ranks.receive(0, std::nullopt, second);
  ranks.deliver();
  expect_done(one);
  expect_done(two);
  EXPECT_EQ(one->sourceRank(), 1);
  EXPECT_EQ(two->sourceRank(), 2);
  EXPECT_TRUE(first.equal(values(1, 4)));
  EXPECT_TRUE(second.equal(values(3, 4)));
}

TEST(Exchange, BothSidesOfAMismatchNameBoth) {
  struct Case {
    at::Tensor sent;
    at::Tensor expected;
  };
  for (const auto& [sent, expected] :
       {Case{values(0, 4), values(0, 5)},
        Case{values(0, 1000), values(0, 999)},
        Case{values(0, 4), values(0, 4, at::kInt)}}) {
    for (const bool send_first : {true, false}) {
      Ranks ranks(2);
      TransferPtr send;
      TransferPtr receive;
      if (send_first) send = ranks.send(0, 1, sent, 3);
      if (send_first) ranks.deliver();
      const auto before = expected.clone();
      receive = ranks.receive(1, 0, expected, 3);
      if (!send_first) send = ranks.send(0, 1, sent, 3);
      ranks.deliver();
      const auto error = error_of<MismatchError>(send);
      EXPECT_NE(error.find("rank 0 sends " + std::to_string(sent.numel()) +
                           " elements of Float with tag 3 to rank 1, which "
                           "expects " +
                           std::to_string(expected.numel()) + " elements of " +
                           c10::toString(expected.scalar_type())),
                std::string::npos)
          << error;
      const auto other = error_of<MismatchError>(receive);
      EXPECT_EQ(other.substr(other.find("rank 0 sends")),
                error.substr(error.find("rank 0 sends")));
      EXPECT_TRUE(expected.equal(before));
      EXPECT_EQ(ranks.errors, 2);
      EXPECT_TRUE(ranks[0].idle() && ranks[1].idle());
    }
  }
}

TEST(Exchange, TheOwnRankCanBeAPeer) {
  for (const bool send_first : {true, false}) {
    Ranks ranks(2);
    const auto to = torch::zeros({50});
    TransferPtr send;
    if (send_first) send = ranks.send(1, 1, values(1, 50), 2);
    const auto receive = ranks.receive(1, std::nullopt, to, 2);
    if (!send_first) send = ranks.send(1, 1, values(1, 50), 2);
    expect_done(send);
    expect_done(receive);
    EXPECT_EQ(receive->sourceRank(), 1);
    EXPECT_TRUE(to.equal(values(1, 50)));
  }
  Ranks ranks(1);
  const auto receive = ranks.receive(0, 0, torch::zeros({3}));
  const auto send = ranks.send(0, 0, torch::zeros({2}));
  error_of<MismatchError>(send);
  error_of<MismatchError>(receive);
  EXPECT_TRUE(ranks[0].idle());
}

TEST(Exchange, DataOfAMessageThatWasGivenUpIsDropped) {
  Ranks ranks(2);
  const auto to = torch::zeros({100});
  const auto receive = ranks.receive(1, 0, to);
  const auto send = ranks.send(0, 1, values(0, 100));
  EXPECT_EQ(ranks.deliver_one(0, 1), Frame::Kind::kOffer);
  EXPECT_EQ(ranks.deliver_one(1, 0), Frame::Kind::kGrant);
  EXPECT_TRUE(ranks[0].flowing() && ranks[1].flowing());
  ranks[1].end_where([](const Transfer& transfer) {
    return std::make_exception_ptr(BackendError("late", transfer.context()));
  });
  EXPECT_TRUE(ranks[1].idle());
  EXPECT_FALSE(ranks[1].flowing());
  const auto before = to.clone();
  ranks.deliver();
  EXPECT_TRUE(to.equal(before));
  EXPECT_FALSE(send->ended());
  EXPECT_EQ(ranks[1].rest_of(0, 0).bytes, 0u);
  // And the other way round: a grant for a send that was given up.
  const auto again = ranks.receive(1, 0, to);
  const auto given_up = ranks.send(0, 1, values(0, 100));
  EXPECT_EQ(ranks.deliver_one(0, 1), Frame::Kind::kOffer);
  ranks[0].end_where([](const Transfer& transfer) {
    return std::make_exception_ptr(BackendError("late", transfer.context()));
  });
  ranks.deliver();
  EXPECT_TRUE(ranks[0].idle());
  EXPECT_FALSE(again->ended());
}

TEST(Exchange, WhatWaitsForAReceiveIsKeptOnlyToABound) {
  Ranks ranks(2);
  // 64 bytes come along with each: at 4 MB the rest is kept by the sender.
  constexpr int kMessages = (4 << 20) / kPayload + 100;
  const auto message = values(0, 16);
  for (int i = 0; i < kMessages; ++i) ranks.send(0, 1, message);
  ranks.deliver();
  const auto to = torch::zeros({16});
  for (int i = 0; i < kMessages; ++i) {
    to.zero_();
    const auto receive = ranks.receive(1, 0, to);
    EXPECT_EQ(receive->ended(), i < kMessages - 100);
    ranks.deliver();
    ASSERT_TRUE(receive->ended());
    ASSERT_TRUE(to.equal(message)) << i;
  }
  EXPECT_TRUE(ranks[0].idle());
}

}  // namespace
}  // namespace lockstep::comm::p2p
