#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"

namespace lockstep::data {
namespace {

using Order = std::vector<int64_t>;

Order to_vector(const at::Tensor& t) {
  return {t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel()};
}

Order range(int64_t n) {
  Order order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

Order sorted(Order order) {
  std::sort(order.begin(), order.end());
  return order;
}

/// One epoch of two replicas over 8 items, through the loader.
std::vector<Order> epoch_of(
    std::vector<DataLoader<TensorDataset<1>>>& loaders) {
  std::vector<Order> orders;
  for (auto& loader : loaders) {
    auto& order = orders.emplace_back();
    for (auto& [batch] : loader) {
      const auto items = to_vector(batch);
      order.insert(order.end(), items.begin(), items.end());
    }
  }
  return orders;
}

struct TwoReplicas {
  std::vector<DistributedSampler> samplers;
  std::vector<DataLoader<TensorDataset<1>>> loaders;

  TwoReplicas() {
    for (int rank = 0; rank < 2; ++rank) {
      samplers.emplace_back(
          8, DistributedSamplerOptions{.num_replicas = 2, .rank = rank});
      loaders.emplace_back(
          TensorDataset(torch::arange(8)),
          DataLoaderOptions{.batch_size = 2, .sampler = samplers.back()});
    }
  }
};

TEST(DistributedSampler, EpochAdvancesByItselfAndEveryItemIsVisitedOnce) {
  TwoReplicas first;
  TwoReplicas second;
  std::vector<std::vector<Order>> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(first.samplers[0].epoch(), epoch);
    epochs.push_back(epoch_of(first.loaders));
    auto all = epochs.back()[0];
    all.insert(all.end(), epochs.back()[1].begin(), epochs.back()[1].end());
    EXPECT_EQ(sorted(all), range(8));
    EXPECT_EQ(epoch_of(second.loaders), epochs.back());
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(DistributedSampler, SetEpochReachesTheLoadersCopy) {
  TwoReplicas job;
  const auto set_epoch = [&](int64_t epoch) {
    for (auto& sampler : job.samplers) sampler.set_epoch(epoch);
  };
  const auto epoch0 = epoch_of(job.loaders);
  const auto epoch1 = epoch_of(job.loaders);
  for (int i = 0; i < 2; ++i) {
    set_epoch(1);
    EXPECT_EQ(epoch_of(job.loaders), epoch1);
  }
  set_epoch(0);
  EXPECT_EQ(epoch_of(job.loaders), epoch0);
}

Order lengths_and_union(DistributedSamplerOptions options, Order& all) {
  Order lengths;
  for (int rank = 0; rank < 3; ++rank) {
    options.num_replicas = 3;
    options.rank = rank;
    DistributedSampler sampler(10, options);
    const auto order = to_vector(sampler.next_pass());
    EXPECT_EQ(static_cast<int64_t>(order.size()), sampler.size());
    lengths.push_back(sampler.size());
    all.insert(all.end(), order.begin(), order.end());
  }
  std::sort(all.begin(), all.end());
  return lengths;
}

TEST(DistributedSampler, PadsDropsOrVisitsExactlyOnce) {
  Order padded;
  EXPECT_EQ(lengths_and_union({.shuffle = false}, padded), (Order{4, 4, 4}));
  EXPECT_EQ(padded, (Order{0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  Order dropped;
  EXPECT_EQ(lengths_and_union({.shuffle = false, .drop_last = true}, dropped),
            (Order{3, 3, 3}));
  EXPECT_EQ(dropped, range(9));
  Order exact;
  EXPECT_EQ(lengths_and_union({.exact = true}, exact), (Order{4, 3, 3}));
  EXPECT_EQ(exact, range(10));
}

TEST(DistributedSampler, PadsMoreThanTheDataSetHolds) {
  DistributedSampler sampler(2,
                             {.num_replicas = 7, .rank = 5, .shuffle = false});
  EXPECT_EQ(to_vector(sampler.next_pass()), (Order{1}));
}

TEST(DistributedSampler, WithoutAGroupIsAWorldOfOne) {
  DistributedSampler sampler(5);
  EXPECT_EQ(sampler.size(), 5);
  EXPECT_EQ(sorted(to_vector(sampler.next_pass())), range(5));
}

TEST(DistributedSampler, RefusesWrongArguments) {
  const auto make = [](int64_t size, DistributedSamplerOptions options) {
    return DistributedSampler(size, options);
  };
  EXPECT_THROW(make(-1, {}), InvalidArgument);
  EXPECT_THROW(make(4, {.num_replicas = 0, .rank = 0}), InvalidArgument);
  EXPECT_THROW(make(4, {.num_replicas = 2, .rank = 2}), InvalidArgument);
  EXPECT_THROW(make(4, {.num_replicas = 2, .rank = -1}), InvalidArgument);
  EXPECT_THROW(make(4, {.drop_last = true, .exact = true}), InvalidArgument);
}

TEST(SequentialSampler, CountsUp) {
  SequentialSampler sampler(4);
  EXPECT_EQ(sampler.size(), 4);
  EXPECT_EQ(to_vector(sampler.next_pass()), range(4));
  EXPECT_THROW(SequentialSampler(-1), InvalidArgument);
}

TEST(RandomSampler, VisitsEachItemOnceInAFreshOrder) {
  RandomSampler sampler(50, {.generator = make_generator(1)});
  const auto first = to_vector(sampler.next_pass());
  const auto second = to_vector(sampler.next_pass());
  EXPECT_EQ(sorted(first), range(50));
  EXPECT_EQ(sorted(second), range(50));
  EXPECT_NE(first, second);
}

TEST(RandomSampler, FollowsManualSeed) {
  RandomSampler sampler(50);
  torch::manual_seed(3);
  const auto first = to_vector(sampler.next_pass());
  EXPECT_NE(to_vector(sampler.next_pass()), first);
  torch::manual_seed(3);
  EXPECT_EQ(to_vector(sampler.next_pass()), first);
}

TEST(RandomSampler, RefusesWrongArguments) {
  EXPECT_THROW(RandomSampler(-1), InvalidArgument);
  EXPECT_THROW(RandomSampler(0), InvalidArgument);
  EXPECT_THROW(RandomSampler(4, {.num_samples = 0}), InvalidArgument);
  EXPECT_THROW(RandomSampler(0, {.replacement = true, .num_samples = 3}),
               InvalidArgument);
}

}  // namespace
}  // namespace lockstep::data
