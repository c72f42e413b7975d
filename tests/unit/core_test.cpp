#include <gtest/gtest.h>
#include <poll.h>

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "core/block_sigpipe.h"
#include "core/clock.h"
#include "core/env.h"
#include "core/poll_until.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

TEST(Error, TextCarriesEverythingThatIsKnown) {
  const PeerLost error("rank 2 (pid 4711) died",
                       {.operation = "all_reduce",
                        .group = "world",
                        .backend = "shm",
                        .rank = 1,
                        .world_size = 4,
                        .peers = {2},
                        .sequence = 17,
                        .elapsed = std::chrono::milliseconds(12)});
  EXPECT_STREQ(error.what(),
               "[shm rank 1/4] all_reduce #17 on group \"world\": rank 2 (pid "
               "4711) died (after 12 ms)");
  EXPECT_EQ(error.message(), "rank 2 (pid 4711) died");
  EXPECT_EQ(error.context().peers, std::vector<int>{2});
}

TEST(Error, TextWithoutContextIsTheMessage) {
  EXPECT_STREQ(InvalidArgument("bad").what(), "bad");
}

TEST(Deadline, ExtremeLimitsDoNotOverflow) {
  using std::chrono::milliseconds;
  const Deadline far(milliseconds::max());
  EXPECT_FALSE(far.passed());
  EXPECT_GT(far.remaining(), std::chrono::hours(24 * 365));
  const Deadline past(milliseconds::min());
  EXPECT_TRUE(past.passed());
  EXPECT_EQ(past.remaining(), milliseconds(0));
}

TEST(PollUntil, ASignalDoesNotEndTheWait) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  struct sigaction former = {};
  ::sigaction(SIGUSR1, &action, &former);
  const pthread_t waiter = ::pthread_self();
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) {
      ::pthread_kill(waiter, SIGUSR1);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(::write(ends[1], "x", 1), 1);
  });
  EXPECT_TRUE(poll_until(ends[0], POLLIN, Deadline(std::chrono::seconds(20))));
  other.join();
  ::sigaction(SIGUSR1, &former, nullptr);
  EXPECT_FALSE(
      poll_until(ends[1], POLLIN, Deadline(std::chrono::milliseconds(5))));
  ::close(ends[0]);
  ::close(ends[1]);
}

int error_of_a_write_to_nobody() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ::close(ends[1]);
  const int error = ::write(ends[0], "x", 1) < 0 ? errno : 0;
  ::close(ends[0]);
  return error;
}

TEST(BlockSigpipe, AWriteToADeadPeerFailsHereAndInThreadsStartedMeanwhile) {
  ASSERT_EQ(std::signal(SIGPIPE, SIG_DFL), SIG_DFL);
  std::thread started;
  int error_there = 0;
  {
    const BlockSigpipe block;
    EXPECT_EQ(error_of_a_write_to_nobody(), EPIPE);
    started = std::thread([&] { error_there = error_of_a_write_to_nobody(); });
  }
  started.join();
  EXPECT_EQ(error_there, EPIPE);
}

TEST(BlockSigpipe, EndsWithItsScope) {
  EXPECT_EXIT(
      {
        { const BlockSigpipe block; }
        error_of_a_write_to_nobody();
        std::exit(0);
      },
      testing::KilledBySignal(SIGPIPE),
      "");
}

TEST(Env, GetIntNamesTheVariableAndTheRange) {
  ::setenv("LOCKSTEP_TEST_NUMBER", "NaN", 1);
  try {
    (void)env::get_int("LOCKSTEP_TEST_NUMBER", 1, 8);
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "LOCKSTEP_TEST_NUMBER=\"NaN\" is not a whole number from 1 "
                 "to 8; set it to one");
  }
  ::setenv("LOCKSTEP_TEST_NUMBER", "9", 1);
  EXPECT_THROW((void)env::get_int("LOCKSTEP_TEST_NUMBER", 1, 8),
               InvalidArgument);
  ::setenv("LOCKSTEP_TEST_NUMBER", "8", 1);
  EXPECT_EQ(env::get_int("LOCKSTEP_TEST_NUMBER", 1, 8), 8);
  ::unsetenv("LOCKSTEP_TEST_NUMBER");
  EXPECT_EQ(env::get_int("LOCKSTEP_TEST_NUMBER"), std::nullopt);
}

TEST(Env, GetBoolRefusesOtherWords) {
  ::setenv("LOCKSTEP_TEST_FLAG", "Yes", 1);
  EXPECT_EQ(env::get_bool("LOCKSTEP_TEST_FLAG"), true);
  ::setenv("LOCKSTEP_TEST_FLAG", "off", 1);
  EXPECT_EQ(env::get_bool("LOCKSTEP_TEST_FLAG"), false);
  ::setenv("LOCKSTEP_TEST_FLAG", "maybe", 1);
  EXPECT_THROW((void)env::get_bool("LOCKSTEP_TEST_FLAG"), InvalidArgument);
  ::unsetenv("LOCKSTEP_TEST_FLAG");
}

}  // namespace
}  // namespace lockstep
