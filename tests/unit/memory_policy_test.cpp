#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
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

long page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// Page faults of writing a large tensor again and again, when the heap has
/// found its shape.
long faults_of_a_loop() {
  for (int i = 0; i < 12; ++i) (void)torch::ones({kFloats});
  const long before = page_faults();
  for (int i = 0; i < 4; ++i) (void)torch::ones({kFloats});
  return page_faults() - before;
}

constexpr long kPagesOfOne = kFloats * 4 / 4096;

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

TEST(MemoryPolicy, LargeTensorsAreReusedWhileItIsOn) {
  EXPECT_FALSE(memory::statistics().enabled);
  EXPECT_GT(faults_of_a_loop(), 3 * kPagesOfOne);
  memory::enable();
  EXPECT_TRUE(memory::statistics().enabled);
  EXPECT_LT(faults_of_a_loop(), kPagesOfOne / 2);

  EXPECT_GE(memory::statistics().cached_bytes, kFloats * 4u);
  {
    const size_t before = memory::statistics().allocated_bytes;
    const auto tensor = torch::ones({kFloats});
    EXPECT_GE(memory::statistics().allocated_bytes, before + kFloats * 4u);
  }
  const long before = page_faults();
  memory::trim();
  (void)torch::ones({kFloats});
  EXPECT_GT(page_faults() - before, kPagesOfOne / 2);

  memory::disable();
  EXPECT_FALSE(memory::statistics().enabled);
  EXPECT_GT(faults_of_a_loop(), 3 * kPagesOfOne);
}

TEST(MemoryPolicy, ALimitReturnsWhatIsAbove) {
  // Greater than any hole in the heap: taken from its end.
  constexpr size_t kBytes = 512 << 20;
  const auto faults_of_one = [] {
    const long before = page_faults();
    auto* memory = static_cast<volatile char*>(std::malloc(kBytes));
    for (size_t i = 0; i < kBytes; i += 4096) memory[i] = 1;
    std::free(const_cast<char*>(memory));
    return page_faults() - before;
  };
  constexpr long kPages = kBytes / 4096;
  memory::enable({.limit_bytes = 1 << 20});
  (void)faults_of_one();
  EXPECT_GT(faults_of_one(), kPages / 2);
  memory::enable({.limit_bytes = size_t{1} << 40});
  (void)faults_of_one();
  EXPECT_LT(faults_of_one(), kPages / 2);
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
