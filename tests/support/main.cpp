#include <gtest/gtest.h>

#include "support/multiprocess.h"

int main(int argc, char** argv) {
  int exit_code = 0;
  if (lockstep::test::run_entry(argc, argv, exit_code)) return exit_code;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
