#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/backends/shm/segment.h"
#include "comm/backends/shm/wait.h"
#include "support/fake_liveness.h"
#include "support/threads.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;
using test::FakeHost;
using test::on_threads;

TEST(ShmSegment, IsZeroedSealedAndHasNoName) {
  const auto segment = Segment::create(10'000);
  ASSERT_EQ(segment->size(), 10'000u);
  for (size_t i = 0; i < segment->size(); ++i) {
    ASSERT_EQ(segment->data()[i], 0);
  }
  EXPECT_EQ(::ftruncate(segment->fd(), 1), -1);
  EXPECT_EQ(::ftruncate(segment->fd(), 100'000), -1);
  EXPECT_NE(::fcntl(segment->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(ShmSegment, PeersSeeTheSameMemory) {
  const auto segment = Segment::create(4096);
  const auto peer = Segment::map(Fd(::dup(segment->fd())), 4096);
  segment->data()[17] = 'x';
  EXPECT_EQ(peer->data()[17], 'x');
}

TEST(ShmSegment, MoreThanThereIsOfMemoryIsAnErrorWithBothFigures) {
  try {
    (void)Segment::create(size_t{1} << 50);
    FAIL() << "no error";
  } catch (const BackendError& error) {
    EXPECT_NE(error.message().find("1125899906842624 bytes is needed"),
              std::string::npos)
        << error.what();
    EXPECT_NE(error.message().find("bytes of memory are left"),
              std::string::npos);
    EXPECT_EQ(error.code(), ENOMEM);
  }
}

TEST(ShmSegment, ForeignDescriptorsAreRefused) {
  EXPECT_THROW((void)Segment::map(Fd(::open("/dev/null", O_RDWR)), 4096),
               BackendError);
  const auto segment = Segment::create(4096);
  EXPECT_THROW((void)Segment::map(Fd(::dup(segment->fd())), 8192),
               BackendError);
  Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_THROW((void)Segment::map(std::move(unsealed), 4096), BackendError);
}

TEST(ShmSegment, ShareOneGivesAllRanksOneSegment) {
  const auto host = FakeHost::make(3);
  std::vector<std::shared_ptr<Segment>> segments(3);
  on_threads(3, [&](int rank) {
    const auto liveness = host->liveness(rank);
    segments[static_cast<size_t>(rank)] =
        share_one(*liveness, "test", 4096, 10s);
  });
  segments[0]->data()[5] = 'a';
  EXPECT_EQ(segments[1]->data()[5], 'a');
  EXPECT_EQ(segments[2]->data()[5], 'a');
}

TEST(ShmSegment, ShareEachGivesAllRanksEverybodysSegment) {
  const auto host = FakeHost::make(3);
  std::vector<std::vector<std::shared_ptr<Segment>>> segments(3);
  on_threads(3, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const auto liveness = host->liveness(rank);
    segments[r] = share_each(*liveness, "test", 4096, 10s);
    segments[r][r]->data()[0] = static_cast<char>('a' + rank);
  });
  for (size_t r = 0; r < 3; ++r) {
    for (size_t owner = 0; owner < 3; ++owner) {
      EXPECT_EQ(segments[r][owner]->data()[0], static_cast<char>('a' + owner));
    }
  }
}

struct Waiting {
  explicit Waiting(int ranks)
      : host(FakeHost::make(ranks, /*cores=*/2)),
        waiter(bell, host->liveness(0)) {}

  void wait(std::chrono::milliseconds timeout) {
    waiter.wait(
        [&] { return flag.load(std::memory_order_acquire) != 0; },
        timeout,
        [] { return std::vector<int>{1}; },
        [] { return ErrorContext{.operation = "test", .backend = "shm"}; });
  }

  std::shared_ptr<FakeHost> host;
  Doorbell bell;
  std::atomic<int> flag{0};
  Waiter waiter;
};

TEST(ShmWaiter, WakesFromSleep) {
  for (const int ranks : {2, 64}) {
    Waiting waiting(ranks);
    std::jthread peer([&] {
      std::this_thread::sleep_for(50ms);
      waiting.flag.store(1, std::memory_order_release);
      ring(waiting.bell);
    });
    waiting.wait(10s);
    EXPECT_EQ(waiting.flag.load(), 1);
  }
}

TEST(ShmWaiter, SpinsOnlyWhereEveryRankHasACore) {
  for (const int cores : {1, 2}) {
    Doorbell bell;
    Waiter waiter(bell, FakeHost::make(2, cores)->liveness(0));
    int looks = 0;
    EXPECT_THROW(waiter.wait(
                     [&] {
                       ++looks;
                       return false;
                     },
                     10ms,
                     [] { return std::vector<int>{1}; },
                     [] { return ErrorContext{}; }),
                 TimeoutError);
    EXPECT_EQ(looks >= 2000, cores == 2) << looks;
  }
}

TEST(ShmWaiter, NeverMissesARing) {
  // Two threads hand a turn to each other with hardly any spinning, so that
  // sleep and ring meet in every order. A lost wake-up would be a time-out.
  const auto host = FakeHost::make(64, /*cores=*/1);
  Doorbell bells[2];
  std::atomic<int> turn{0};
  on_threads(2, [&](int rank) {
    Waiter waiter(bells[rank], host->liveness(rank));
    for (int i = 0; i < 5000; ++i) {
      waiter.wait([&] { return turn.load(std::memory_order_acquire) == rank; },
                  20s,
                  [&] { return std::vector<int>{1 - rank}; },
                  [] { return ErrorContext{}; });
      turn.store(1 - rank, std::memory_order_release);
      ring(bells[1 - rank]);
    }
  });
}

TEST(ShmWaiter, TimesOutNamingWhoIsMissingAndHardlyUsesTheProcessor) {
  Waiting waiting(2);
  rusage before{};
  ::getrusage(RUSAGE_THREAD, &before);
  const auto start = Clock::now();
  try {
    waiting.wait(1500ms);
    FAIL() << "no error";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.context().peers, std::vector<int>{1});
    EXPECT_EQ(error.context().operation, "test");
    EXPECT_NE(error.message().find("rank 1 did not arrive within 1500 ms"),
              std::string::npos)
        << error.what();
  }
  const auto waited = Clock::now() - start;
  EXPECT_GE(waited, 1500ms);
  rusage after{};
  ::getrusage(RUSAGE_THREAD, &after);
  const auto used = (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1.0 +
                    (after.ru_utime.tv_usec - before.ru_utime.tv_usec) * 1e-6 +
                    (after.ru_stime.tv_sec - before.ru_stime.tv_sec) * 1.0 +
                    (after.ru_stime.tv_usec - before.ru_stime.tv_usec) * 1e-6;
  EXPECT_LT(used, 0.5);
}

TEST(ShmWaiter, ADeathEndsTheWait) {
  Waiting waiting(3);
  std::jthread killer([&] {
    std::this_thread::sleep_for(50ms);
    waiting.host->kill(2);
  });
  try {
    waiting.wait(20s);
    FAIL() << "no error";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.context().peers, std::vector<int>{2});
  }
}

TEST(ShmWaiter, WhatIsCompleteIsNotReportedLost) {
  Waiting waiting(2);
  waiting.host->kill(1);
  waiting.flag = 1;
  EXPECT_NO_THROW(waiting.wait(1s));
}

TEST(ShmWaiter, ARankThatLeftMattersOnlyToThoseWhoWaitForIt) {
  Waiting waiting(3);
  waiting.host->leave(2);
  std::jthread peer([&] {
    std::this_thread::sleep_for(50ms);
    waiting.flag.store(1, std::memory_order_release);
    ring(waiting.bell);
  });
  EXPECT_NO_THROW(waiting.wait(20s));
  waiting.flag = 0;
  waiting.host->leave(1);
  EXPECT_THROW(waiting.wait(20s), PeerLost);
}

}  // namespace
}  // namespace lockstep::comm::shm
