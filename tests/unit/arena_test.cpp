#include "memory/arena.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

namespace lockstep::memory {
namespace {

constexpr size_t kBytes = 1 << 20;
constexpr int64_t kFloats = kBytes / sizeof(float);

/// Memory that says when it is gone.
struct Mapping {
  explicit Mapping(size_t bytes)
      : data(static_cast<char*>(std::aligned_alloc(Arena::kAlignment, bytes))),
        owner(data, [gone = gone](void* p) {
          *gone = true;
          std::free(p);
        }) {}
  std::shared_ptr<bool> gone = std::make_shared<bool>(false);
  char* data;
  std::shared_ptr<void> owner;
};

/// An arena of slots of `kBytes` each.
class ArenaTest : public ::testing::Test {
 protected:
  explicit ArenaTest(size_t n = 2)
      : slots_(n, kBytes),
        mapping_(Arena::bytes(slots_)),
        begin_(mapping_.data),
        gone_(mapping_.gone),
        arena_(std::make_unique<Arena>(
            std::move(mapping_.owner), begin_, slots_)) {}

  bool inside(const at::Tensor& tensor) const {
    const auto* data = static_cast<const char*>(tensor.const_data_ptr());
    return data >= begin_ && data < begin_ + Arena::bytes(slots_);
  }

  std::vector<size_t> slots_;
  Mapping mapping_;
  char* begin_;
  std::shared_ptr<bool> gone_;
  std::unique_ptr<Arena> arena_;
};

TEST_F(ArenaTest, ServesSlotsOfTheirSizeWhileActive) {
  EXPECT_FALSE(inside(torch::empty({kFloats})));
  arena_->activate();
  const auto first = torch::empty({kFloats});
  const auto other_size = torch::empty({kFloats - 1});
  const auto second = torch::empty({kFloats});
  const auto full = torch::empty({kFloats});
  arena_->deactivate();
  const auto after = torch::empty({kFloats});
  EXPECT_TRUE(inside(first));
  EXPECT_TRUE(inside(second));
  EXPECT_NE(first.data_ptr(), second.data_ptr());
  EXPECT_FALSE(inside(other_size));
  EXPECT_FALSE(inside(full));
  EXPECT_FALSE(inside(after));
  EXPECT_EQ(arena_->offset_of(second.data_ptr(), kBytes), kBytes);
  EXPECT_EQ(arena_->offset_of(second.data_ptr(), kBytes - 4), std::nullopt);
  EXPECT_EQ(arena_->offset_of(full.data_ptr(), kBytes), std::nullopt);
}

TEST_F(ArenaTest, ASlotIsFreeWhenItsTensorIsGone) {
  arena_->activate();
  auto tensor = torch::empty({kFloats});
  const auto view = tensor.narrow(0, 5, 7);
  const auto* data = tensor.data_ptr();
  tensor.reset();
  const auto second = torch::empty({kFloats});
  EXPECT_NE(second.data_ptr(), data);
  EXPECT_FALSE(inside(torch::empty({kFloats})));
  const_cast<at::Tensor&>(view).reset();
  EXPECT_EQ(torch::empty({kFloats}).data_ptr(), data);
  arena_->deactivate();
}

TEST_F(ArenaTest, TheMappingLivesUntilItsLastTensorIsGone) {
  arena_->activate();
  auto tensor = torch::full({kFloats}, 3.0F);
  EXPECT_EQ(arena_usage().total, 2 * kBytes);
  EXPECT_EQ(arena_usage().used, kBytes);
  arena_.reset();
  EXPECT_FALSE(*gone_);
  EXPECT_FALSE(inside(torch::empty({kFloats})));
  EXPECT_EQ(tensor.sum().item<float>(), 3.0F * kFloats);
  std::thread([&] { tensor.reset(); }).join();
  EXPECT_TRUE(*gone_);
  EXPECT_EQ(arena_usage().total, 0u);
}

TEST_F(ArenaTest, ARetiredArenaHandsOutNothing) {
  arena_->activate();
  { const auto tensor = torch::empty({kFloats}); }
  arena_->retire();
  EXPECT_FALSE(inside(torch::empty({kFloats})));
  arena_->deactivate();
}

TEST_F(ArenaTest, OtherThreadsNeverSeeIt) {
  arena_->activate();
  std::thread([&] { EXPECT_FALSE(inside(torch::empty({kFloats}))); }).join();
  EXPECT_TRUE(inside(torch::empty({kFloats})));
  arena_->deactivate();
}

TEST_F(ArenaTest, RawAllocationsOfBothKindsAreFreed) {
  auto* allocator = c10::GetCPUAllocator();
  void* foreign = allocator->raw_allocate(kBytes);
  arena_->activate();
  void* own = allocator->raw_allocate(kBytes);
  arena_->deactivate();
  EXPECT_EQ(arena_usage().used, kBytes);
  allocator->raw_deallocate(foreign);
  allocator->raw_deallocate(own);
  EXPECT_EQ(arena_usage().used, 0u);
}

TEST_F(ArenaTest, ConvolutionsRunInIt) {
  // oneDNN takes and frees raw memory.
  const auto input = torch::ones({2, 64, 8, 8});
  auto weight = torch::ones({64, 64, 8, 8}, torch::requires_grad());
  ASSERT_EQ(weight.nbytes(), kBytes);
  for (int i = 0; i < 3; ++i) {
    weight.mutable_grad().reset();
    auto loss = torch::conv2d(input, weight).sum();
    arena_->activate();
    loss.backward();
    arena_->deactivate();
    EXPECT_TRUE(torch::equal(weight.grad(), torch::full_like(weight, 2)));
  }
}

TEST_F(ArenaTest, AForkedChildUsesMemoryFreely) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) (void)torch::empty({kFloats});
  });
  for (int i = 0; i < 20; ++i) {
    arena_->activate();
    const pid_t child = ::fork();
    if (child == 0) {
      auto* allocator = c10::GetCPUAllocator();
      for (int k = 0; k < 10; ++k) {
        allocator->raw_deallocate(allocator->raw_allocate(kBytes));
      }
      ::_exit(0);
    }
    arena_->deactivate();
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  busy.join();
}

struct Reports final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(
      void*, int64_t bytes, size_t, size_t, c10::Device) override {
    sum += bytes;
    ++count;
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
  int64_t sum = 0;
  int count = 0;
};

TEST_F(ArenaTest, TheMemoryProfilerSeesItsTensors) {
  const auto reports = std::make_shared<Reports>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reports);
  arena_->activate();
  auto tensor = torch::empty({kFloats});
  arena_->deactivate();
  ASSERT_TRUE(inside(tensor));
  EXPECT_EQ(reports->sum, static_cast<int64_t>(kBytes));
  tensor.reset();
  EXPECT_EQ(reports->sum, 0);
  EXPECT_EQ(reports->count, 2);
}

}  // namespace
}  // namespace lockstep::memory
