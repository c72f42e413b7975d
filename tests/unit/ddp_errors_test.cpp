#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "ddp_support.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using test::formula;
using test::loss_of;
using test::message_of;
using test::mlp;
using testing::run_ranks;
using namespace std::chrono_literals;

constexpr int64_t kRows = 4;

class DdpErrorsOver : public ::testing::TestWithParam<std::string> {
 protected:
  void ranks(int n, const std::function<void(int)>& fn) {
    run_ranks(
        n, fn, {.backend = GetParam(), .timeout = std::chrono::seconds(20)});
  }
};
INSTANTIATE_TEST_SUITE_P(Backends,
                         DdpErrorsOver,
                         ::testing::ValuesIn(test::kDdpBackends),
                         [](const auto& one) { return one.param; });

TEST(DdpErrors, APeerThatLeavesOrIsLateIsNamed) {
  run_ranks(2,
            [](int rank) {
              auto model = DistributedDataParallel(mlp());
              if (rank == 1) return;
              auto loss = loss_of(model->forward(formula({kRows, 6})));
              const auto text = message_of<PeerLost>([&] { loss.backward(); });
              EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
              auto again = loss_of(model->forward(formula({kRows, 6})));
              EXPECT_THROW(again.backward(), InvalidArgument);
            },
            {.backend = "shm"});
}

TEST_P(DdpErrorsOver, ALateRankIsNamedByAllThatWaitForIt) {
  std::atomic<int> timed_out{0};
  run_ranks(3,
            [&](int rank) {
              auto model = DistributedDataParallel(mlp());
              if (rank == 2) {
                while (timed_out < 2) std::this_thread::sleep_for(1ms);
                return;
              }
              auto loss = loss_of(model->forward(formula({kRows, 6})));
              // The first to give up does not become the culprit for the
              // others.
              if (rank == 1) std::this_thread::sleep_for(400ms);
              try {
                loss.backward();
                ADD_FAILURE() << "no error";
              } catch (const TimeoutError& error) {
                EXPECT_EQ(error.context().peers, std::vector<int>{2})
                    << error.what();
              } catch (const Error& error) {
                ADD_FAILURE() << error.what();
              }
              ++timed_out;
            },
            {.backend = GetParam(), .timeout = 2s});
}

TEST_P(DdpErrorsOver, WhatCannotBeAveragedIsRefused) {
  ranks(2, [](int) {
    auto model = DistributedDataParallel(mlp());
    const auto input = formula({kRows, 6}).set_requires_grad(true);
    auto loss = loss_of(model->forward(input));
    EXPECT_THROW(loss.backward({}, true, /*create_graph=*/true), Unsupported);
    // The inner derivative is the module's own business.
    for (auto& parameter : model->parameters())
      parameter.mutable_grad().reset();
    loss = loss_of(model->forward(input));
    const auto inner = torch::autograd::grad(
        {loss}, {input}, /*grad_outputs=*/{}, true, /*create_graph=*/true);
    (loss + inner[0].pow(2).sum()).backward();

    torch::nn::Sequential sparse(
        torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true)));
    auto embedding = DistributedDataParallel(sparse);
    auto sum = embedding->forward(torch::arange(3)).sum();
    const auto text = message_of<Unsupported>([&] { sum.backward(); });
    EXPECT_NE(text.find("\"0.weight\" has a sparse gradient"),
              std::string::npos)
        << text;
  });
}

TEST_P(DdpErrorsOver, ModelsThatCannotBeAveragedAreRefusedOnEveryRank) {
  ranks(2, [](int) {
    auto complex = mlp();
    complex->register_parameter("z", torch::ones(2, torch::kComplexFloat));
    EXPECT_NE(message_of<Unsupported>([&] {
                DistributedDataParallel model(complex);
              }).find("\"z\" has dtype ComplexFloat"),
              std::string::npos);
    auto spread = mlp();
    spread->register_parameter("m", torch::ones(2, torch::kMeta));
    EXPECT_NE(message_of<InvalidArgument>([&] {
                DistributedDataParallel model(spread);
              }).find("\"m\" is on meta, \"0.weight\" on cpu"),
              std::string::npos);
  });
}

TEST_P(DdpErrorsOver, AModuleConvertedAfterWrappingIsRefused) {
  ranks(2, [](int) {
    auto net = mlp();
    auto model = DistributedDataParallel(net);
    net->to(torch::kDouble);
    auto loss = loss_of(model->forward(formula({kRows, 6}).to(torch::kDouble)));
    auto text = message_of<InvalidArgument>([&] { loss.backward(); });
    EXPECT_NE(text.find("was converted after wrapping"), std::string::npos)
        << text;

    auto normed = torch::nn::Sequential(torch::nn::BatchNorm1d(6));
    auto other = DistributedDataParallel(normed);
    normed->to(torch::kDouble);
    text = message_of<InvalidArgument>([&] {
      (void)other->forward(formula({kRows, 6}).to(torch::kDouble));
    });
    EXPECT_NE(text.find("buffer \"0.running_mean\" was converted"),
              std::string::npos)
        << text;
  });
}

TEST_P(DdpErrorsOver, AfterItsGroupAWrapperIsRefusedAndCanBeReplaced) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ranks(2, [&](int rank) {
    auto net = mlp();
    auto old = DistributedDataParallel(net);
    loss_of(old->forward(formula({kRows, 6}))).backward();
    destroy_process_group();
    auto loss = loss_of(old->forward(formula({kRows, 6})));
    const auto text = message_of<InvalidArgument>([&] { loss.backward(); });
    EXPECT_NE(text.find("the group was destroyed"), std::string::npos) << text;

    init_process_group(
        store,
        {.backend = GetParam(), .timeout = 20s, .world_size = 2, .rank = rank});
    auto model = DistributedDataParallel(net);
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    loss_of(model->forward(formula({kRows, 6}, rank))).backward();
    auto reference = net->parameters()[0].grad().clone();
    broadcast(reference);
    EXPECT_TRUE(torch::equal(reference, net->parameters()[0].grad()));
  });
}

TEST(DdpErrors, ArgumentsOfTheWrapper) {
  EXPECT_THROW(DistributedDataParallel{mlp()}, InvalidArgument);  // no group
  run_ranks(2, [](int) {
    torch::nn::Sequential frozen(torch::nn::Linear(2, 2));
    for (auto& parameter : frozen->parameters()) {
      parameter.set_requires_grad(false);
    }
    EXPECT_THROW(DistributedDataParallel{frozen}, InvalidArgument);
    torch::nn::Sequential empty;
    EXPECT_THROW(DistributedDataParallel{empty}, InvalidArgument);
    EXPECT_THROW((DistributedDataParallel{mlp(), {.bucket_cap_mb = 0}}),
                 InvalidArgument);

    auto net = mlp();
    { const DistributedDataParallel gone(net); }
    auto model = DistributedDataParallel(net);
    loss_of(model->forward(formula({kRows, 6}))).backward();
    const auto text = message_of<InvalidArgument>(
        [&] { DistributedDataParallel twice(net); });
    EXPECT_NE(text.find("\"0.weight\" belongs to another"), std::string::npos)
        << text;
    EXPECT_NO_THROW(model->to(torch::kCPU));
    EXPECT_NO_THROW(model->to(torch::kCPU, torch::kFloat));
    EXPECT_THROW(model->to(torch::kDouble), InvalidArgument);
    EXPECT_THROW(model->to(torch::kMeta), InvalidArgument);
  });
}

}  // namespace
}  // namespace lockstep
