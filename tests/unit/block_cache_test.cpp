#include "memory/block_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace lockstep::memory {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class BlockCacheTest : public ::testing::Test {
 protected:
  BlockCacheTest() { cache_.set_enabled(true); }
  ~BlockCacheTest() override {
    EXPECT_EQ(cache_.used_bytes(), 0u);
    cache_.trim();
    EXPECT_EQ(cache_.free_bytes(), 0u);
  }

  BlockCache cache_;
};

TEST_F(BlockCacheTest, BlocksAreAlignedAndHoldWhatWasAsked) {
  std::vector<void*> blocks;
  std::vector<size_t> sizes;
  for (size_t power = 1; power <= 64 * kMiB; power *= 2) {
    for (const size_t bytes :
         {power - 1, power, power + 1, power + power / 3}) {
      if (bytes > 0) sizes.push_back(bytes);
    }
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    void* data = cache_.take(sizes[i]);
    ASSERT_NE(data, nullptr) << sizes[i];
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % BlockCache::kAlignment, 0u);
    std::memset(data, static_cast<int>(i % 251), sizes[i]);
    EXPECT_TRUE(cache_.owns(data));
    blocks.push_back(data);
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto* bytes = static_cast<unsigned char*>(blocks[i]);
    EXPECT_TRUE(std::all_of(bytes, bytes + sizes[i], [i](unsigned char byte) {
      return byte == i % 251;
    })) << sizes[i];
    cache_.give_back(blocks[i]);
  }
}

TEST_F(BlockCacheTest, AFreedBlockServesItsSizeAgain) {
  for (const size_t bytes : {2000ul, 100'000ul, 5 * kMiB}) {
    void* first = cache_.take(bytes);
    void* second = cache_.take(bytes);
    EXPECT_NE(first, second);
    cache_.give_back(first);
    EXPECT_EQ(cache_.take(bytes), first);
    cache_.give_back(first);
    cache_.give_back(second);
  }
}

TEST_F(BlockCacheTest, AFreeBlockUpToTwiceTheSizeServes) {
  // Room for free blocks: see the next test.
  cache_.give_back(cache_.take(32 * kMiB));
  cache_.trim();
  void* block = cache_.take(3 * kMiB);
  cache_.give_back(block);
  void* smaller = cache_.take(2 * kMiB);
  EXPECT_EQ(smaller, block);
  cache_.give_back(smaller);
  void* much_smaller = cache_.take(kMiB);
  EXPECT_NE(much_smaller, block);
  cache_.give_back(much_smaller);
}

TEST_F(BlockCacheTest, KeepsNoMoreThanAQuarterAboveTheGreatestUse) {
  std::mt19937_64 random(1);
  std::vector<void*> alive;
  size_t peak = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (alive.size() < 20 && random() % 2 == 0) {
      alive.push_back(cache_.take(10'000 + random() % (8 * kMiB)));
      ASSERT_NE(alive.back(), nullptr);
    } else if (!alive.empty()) {
      std::swap(alive[random() % alive.size()], alive.back());
      cache_.give_back(alive.back());
      alive.pop_back();
    }
    peak = std::max(peak, cache_.used_bytes());
    ASSERT_LE(cache_.used_bytes() + cache_.free_bytes(), peak + peak / 4);
  }
  for (void* block : alive) cache_.give_back(block);
}

TEST_F(BlockCacheTest, ALimitBoundsTheFreeBlocks) {
  std::vector<void*> blocks(8);
  for (auto& block : blocks) block = cache_.take(5 * kMiB);
  cache_.set_limit(20 * kMiB);
  for (void* block : blocks) cache_.give_back(block);
  EXPECT_LE(cache_.free_bytes(), 20 * kMiB);
  EXPECT_GE(cache_.free_bytes(), 10 * kMiB);
  cache_.set_limit(7 * kMiB);
  EXPECT_LE(cache_.free_bytes(), 7 * kMiB);
}

TEST_F(BlockCacheTest, WhileOffItHandsOutNothingAndKeepsNothing) {
  void* block = cache_.take(kMiB);
  cache_.set_enabled(false);
  EXPECT_EQ(cache_.take(kMiB), nullptr);
  cache_.give_back(block);
  EXPECT_EQ(cache_.free_bytes(), 0u);
  EXPECT_FALSE(cache_.owns(block));
}

TEST_F(BlockCacheTest, WhatTheSystemDoesNotHaveIsNull) {
  EXPECT_EQ(cache_.take(SIZE_MAX), nullptr);
  EXPECT_EQ(cache_.take(size_t{1} << 60), nullptr);
}

TEST_F(BlockCacheTest, ThreadsMayFreeEachOthersBlocks) {
  constexpr int kThreads = 4;
  std::mutex mutex;
  std::vector<std::pair<unsigned char*, unsigned char>> shared;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 2000; ++i) {
        const size_t bytes = 2000 + random() % 100'000;
        auto* data = static_cast<unsigned char*>(cache_.take(bytes));
        const auto mark = static_cast<unsigned char>(random());
        data[0] = data[2000 - 1] = mark;
        const std::lock_guard lock(mutex);
        shared.emplace_back(data, mark);
        std::swap(shared[random() % shared.size()], shared.back());
        if (shared.size() > 50) {
          const auto [other, others_mark] = shared.back();
          shared.pop_back();
          EXPECT_EQ(other[0], others_mark);
          EXPECT_EQ(other[2000 - 1], others_mark);
          cache_.give_back(other);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& [data, mark] : shared) {
    EXPECT_EQ(data[0], mark);
    cache_.give_back(data);
  }
}

}  // namespace
}  // namespace lockstep::memory
