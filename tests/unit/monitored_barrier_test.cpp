#include "lockstep/distributed/monitored_barrier.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/testing/run_ranks.h"
#include "support/thread_backends.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

class MonitoredBarrier : public ::testing::TestWithParam<std::string> {
 protected:
  void run(int ranks, const std::function<void(int rank)>& fn) const {
    testing::run_ranks(ranks, fn, {.backend = GetParam(), .timeout = 60s});
  }

  /// Calls it where others do not come; returns those that the error names.
  static std::vector<int> missing(const MonitoredBarrierOptions& options) {
    try {
      monitored_barrier(options);
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.context().operation, "monitored_barrier");
      return error.context().peers;
    }
    return {};
  }
};

INSTANTIATE_TEST_SUITE_P(Backends,
                         MonitoredBarrier,
                         ::testing::ValuesIn(thread_backends()),
                         [](const auto& parameter) { return parameter.param; });

TEST_P(MonitoredBarrier, NobodyPassesBeforeAllHaveCome) {
  std::atomic<int> came = 0;
  run(3, [&](int rank) {
    for (int i = 1; i <= 20; ++i) {
      if (i % 3 == rank) std::this_thread::sleep_for(5ms);
      ++came;
      monitored_barrier();
      EXPECT_GE(came, 3 * i);
      barrier();
    }
  });
}

TEST_P(MonitoredBarrier, AllNameThoseThatDidNotCome) {
  std::atomic<int> failed = 0;
  run(5, [&](int rank) {
    if (rank == 1 || rank == 3) {
      while (failed < 3) std::this_thread::sleep_for(5ms);
      // Late ones are told, too.
      EXPECT_EQ(missing({.timeout = 30s}), (std::vector{1, 3}));
    } else {
      EXPECT_EQ(missing({.timeout = 300ms}), (std::vector{1, 3}));
      ++failed;
    }
  });
}

TEST_P(MonitoredBarrier, WithoutTheFirstRankTheOthersNameIt) {
  std::atomic<int> failed = 0;
  run(3, [&](int rank) {
    if (rank == 0) {
      while (failed < 2) std::this_thread::sleep_for(5ms);
      return;
    }
    EXPECT_EQ(missing({.timeout = 200ms}), std::vector{0});
    ++failed;
  });
}

TEST_P(MonitoredBarrier, AFirstRankThatComesLateIsNotNamed) {
  std::atomic<int> failed = 0;
  run(3, [&](int rank) {
    if (rank == 2) {
      while (failed < 2) std::this_thread::sleep_for(5ms);
      return;
    }
    if (rank == 0) std::this_thread::sleep_for(1'200ms);
    EXPECT_EQ(missing({.timeout = 500ms}), std::vector{2});
    ++failed;
  });
}

TEST_P(MonitoredBarrier, InAGroupGlobalRanksAreNamed) {
  std::atomic<bool> failed = false;
  run(4, [&](int rank) {
    const auto pair = new_group({3, 1});
    if (rank == 3) {
      while (!failed) std::this_thread::sleep_for(5ms);
    } else if (rank == 1) {
      EXPECT_EQ(missing({.group = pair, .timeout = 200ms}), std::vector{3});
      failed = true;
    } else {
      monitored_barrier({.group = pair});  // no member: nothing happens
    }
  });
}

TEST_P(MonitoredBarrier, ALostRankIsNamedAtOnce) {
  run(3, [](int rank) {
    if (rank == 2) {
      destroy_process_group();
      return;
    }
    try {
      monitored_barrier({.timeout = 30s});
      ADD_FAILURE() << "passed without rank 2";
    } catch (const PeerLost& error) {
      EXPECT_EQ(error.context().peers, std::vector{2});
    }
  });
}

TEST(MonitoredBarrierAlone, ReturnsAtOnce) {
  testing::run_ranks(1, [](int) { monitored_barrier({.timeout = 1ms}); });
}

TEST(MonitoredBarrierAlone, WrongTimeoutsAreRefused) {
  testing::run_ranks(1, [](int) {
    EXPECT_THROW(monitored_barrier({.timeout = 0ms}), InvalidArgument);
  });
}

}  // namespace
}  // namespace lockstep
