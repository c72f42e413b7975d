#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/memory/memory.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

constexpr int64_t kFloats = 8 << 20;  // 32 MiB

constexpr size_t kBytes = kFloats * 4;

TEST(MemoryPolicy, StartsWithTheFirstWrapperUnlessTheUserChose) {
  testing::run_ranks(1, [](int) {
    torch::nn::Linear net(2, 2);
    DistributedDataParallel off(net, {.memory_policy = false});
    EXPECT_FALSE(memory::statistics().enabled);
    DistributedDataParallel on(net);
    EXPECT_TRUE(memory::statistics().enabled);
    memory::disable();
    DistributedDataParallel again(net);
    EXPECT_FALSE(memory::statistics().enabled);
  });
}

TEST(MemoryPolicy, TensorsComeFromWhatWasFreedWhileItIsOn) {
  EXPECT_FALSE(memory::statistics().enabled);
  memory::enable();
  EXPECT_TRUE(memory::statistics().enabled);

  const size_t before = memory::statistics().allocated_bytes;
  auto tensor = torch::ones({kFloats});
  EXPECT_GE(memory::statistics().allocated_bytes, before + kBytes);
  const void* data = tensor.const_data_ptr();
  tensor.reset();
  EXPECT_EQ(memory::statistics().allocated_bytes, before);
  EXPECT_GE(memory::statistics().cached_bytes, kBytes);
  tensor = torch::ones({kFloats});
  EXPECT_EQ(tensor.const_data_ptr(), data);
  EXPECT_EQ(tensor.sum().item<float>(), kFloats);

  memory::trim();
  EXPECT_EQ(memory::statistics().cached_bytes, 0u);
  memory::disable();
  EXPECT_FALSE(memory::statistics().enabled);
  tensor.reset();
  EXPECT_EQ(memory::statistics().cached_bytes, 0u);
  const auto ordinary = torch::ones({kFloats});
  EXPECT_EQ(memory::statistics().allocated_bytes, before);
}

TEST(MemoryPolicy, RawMemoryGoesBackWhereItCameFrom) {
  auto* stock = c10::GetCPUAllocator();
  void* from_stock = stock->raw_allocate(kBytes);
  memory::enable();
  auto* ours = c10::GetCPUAllocator();
  const size_t before = memory::statistics().allocated_bytes;
  void* small = ours->raw_allocate(100);
  void* large = ours->raw_allocate(kBytes);
  EXPECT_GE(memory::statistics().allocated_bytes, before + kBytes);
  ours->raw_deallocate(from_stock);
  ours->raw_deallocate(small);
  ours->raw_deallocate(large);
  ours->raw_deallocate(nullptr);
  EXPECT_EQ(memory::statistics().allocated_bytes, before);
  memory::disable();
}

TEST(MemoryPolicy, ALimitBoundsWhatIsKept) {
  memory::enable({.limit_bytes = kBytes / 2});
  (void)torch::ones({kFloats});
  EXPECT_LE(memory::statistics().cached_bytes, kBytes / 2);
  memory::enable({.limit_bytes = size_t{1} << 40});
  (void)torch::ones({kFloats});
  EXPECT_GE(memory::statistics().cached_bytes, kBytes);
  memory::enable({.limit_bytes = 0});
  EXPECT_EQ(memory::statistics().cached_bytes, 0u);
  memory::disable();
}

TEST(MemoryPolicy, TheEnvironmentKeepsItOff) {
  ::setenv("LOCKSTEP_MEMORY_POLICY", "off", 1);
  memory::enable();
  EXPECT_FALSE(memory::statistics().enabled);
  ::setenv("LOCKSTEP_MEMORY_POLICY", "perhaps", 1);
  EXPECT_THROW(memory::enable(), InvalidArgument);
  ::unsetenv("LOCKSTEP_MEMORY_POLICY");
}

}  // namespace
}  // namespace lockstep
