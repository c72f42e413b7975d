#include <gtest/gtest.h>

#include <cstdlib>

#include "core/env.h"
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
