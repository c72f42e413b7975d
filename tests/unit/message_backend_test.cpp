// Sends and receives of the backends as c10d's clients see them.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/backend_registry.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class MessageBackend : public ::testing::TestWithParam<std::string> {
 protected:
  void run(int ranks, const std::function<void(int rank)>& fn) const {
    testing::run_ranks(ranks, fn, {.backend = GetParam(), .timeout = 30s});
  }

  static WorkPtr send(const at::Tensor& tensor, int peer, int tag = 0) {
    std::vector<at::Tensor> tensors = {tensor};
    return get_group()->send(tensors, peer, tag);
  }
  static WorkPtr recv(const at::Tensor& tensor, int peer, int tag = 0) {
    std::vector<at::Tensor> tensors = {tensor};
    return get_group()->recv(tensors, peer, tag);
  }
  static WorkPtr recv_any(const at::Tensor& tensor, int tag = 0) {
    std::vector<at::Tensor> tensors = {tensor};
    return get_group()->recvAnysource(tensors, tag);
  }
};

std::vector<std::string> backends() {
  std::vector<std::string> names;
  for (const auto& name : comm::available_backends()) {
    if (name == "shm" || name == "gloo") names.push_back(name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Backends,
                         MessageBackend,
                         ::testing::ValuesIn(backends()),
                         [](const auto& named) { return named.param; });

TEST_P(MessageBackend, ThroughC10dsGroup) {
  run(3, [](int rank) {
    const int next = (rank + 1) % 3;
    const int last = (rank + 2) % 3;
    for (const int64_t numel : {0, 1, 1025, 300'007}) {
      const auto to = torch::zeros({numel});
      const auto sent =
          send(torch::arange(numel, torch::kFloat) + rank, next, 5);
      const auto received = recv(to, last, 5);
      EXPECT_TRUE(received->wait());
      EXPECT_TRUE(sent->wait());
      EXPECT_TRUE(to.equal(torch::arange(numel, torch::kFloat) + last));
      EXPECT_TRUE(received->isCompleted() && received->isSuccess());
      EXPECT_EQ(received->sourceRank(), last);
      ASSERT_EQ(received->result().size(), 1u);
      EXPECT_TRUE(received->result()[0].is_same(to));
    }
  });
}

TEST_P(MessageBackend, FromAnyRank) {
  run(3, [](int rank) {
    if (rank != 1) {
      send(torch::full({3}, static_cast<float>(rank)), 1)->wait();
      return;
    }
    std::set<int> sources;
    for (int i = 0; i < 2; ++i) {
      const auto to = torch::zeros({3});
      const auto work = recv_any(to);
      work->wait();
      EXPECT_EQ(to[1].item<int>(), work->sourceRank());
      sources.insert(work->sourceRank());
    }
    EXPECT_EQ(sources, (std::set<int>{0, 2}));
  });
}

TEST_P(MessageBackend, FuturesHoldTheTensor) {
  run(2, [](int rank) {
    std::atomic<int> called{0};
    const auto to = torch::zeros({70'000});
    const auto work = rank == 0 ? send(torch::ones({70'000}), 1) : recv(to, 0);
    const auto early = work->getFuture();
    early->addCallback([&](c10::ivalue::Future&) { ++called; });
    work->wait();
    early->wait();
    for (int i = 0; called == 0 && i < 5000; ++i) {
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_EQ(called, 1);
    if (rank == 1) {
      EXPECT_TRUE(early->value().toTensorVector().at(0).is_same(to));
    }
    const auto late =
        rank == 0 ? send(torch::ones({1}), 1) : recv(torch::zeros({1}), 0);
    late->wait();
    EXPECT_TRUE(late->getFuture()->completed());
  });
}

TEST_P(MessageBackend, WrongArgumentsAreRefusedAtOnce) {
  run(2, [](int rank) {
    const auto refused = [](const std::function<void()>& call,
                            const std::string& part) {
      try {
        call();
        ADD_FAILURE() << "no error: " << part;
      } catch (const InvalidArgument& e) {
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos)
            << e.what();
      }
    };
    const auto tensor = torch::ones({4, 4});
    refused([&] { send(tensor, 2); }, "the peer is 2; ranks are 0 to 1");
    refused([&] { recv(tensor, -1); }, "the peer is -1");
    refused([&] { send(tensor, 1, -1); }, "tag is -1");
    refused([&] { send(tensor.t(), 1); }, "contiguous");
    std::vector<at::Tensor> two = {tensor, tensor};
    refused([&] { get_group()->send(two, 1, 0); }, "one tensor is needed");
    // The group is as good as before.
    const auto to = torch::zeros({4, 4});
    const auto work = rank == 0 ? send(tensor, 1) : recv(to, 0);
    EXPECT_TRUE(work->wait());
  });
}

TEST_P(MessageBackend, AShortWaitLeavesTheTransferGoing) {
  run(2, [](int rank) {
    const auto to = torch::zeros({9});
    if (rank == 1) {
      const auto work = recv(to, 0);
      EXPECT_THROW(work->wait(20ms), TimeoutError);
      EXPECT_FALSE(work->isCompleted());
      send(torch::ones({1}), 0)->wait();
      work->wait();
      EXPECT_TRUE(to.equal(torch::arange(9.)));
    } else {
      recv(torch::zeros({1}), 1)->wait();
      send(torch::arange(9.), 1)->wait();
    }
  });
}

}  // namespace
}  // namespace lockstep
