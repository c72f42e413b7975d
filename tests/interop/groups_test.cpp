#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/new_group.h"
#include "support/multiprocess.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

void describe(const ProcessGroup& group) {
  if (!group.is_member()) return;
  auto total = torch::full(5, get_rank() + 1.0);
  all_reduce(total, {.group = group});
  auto first = torch::full(1, get_rank(), at::kLong);
  broadcast(first, {.group = group, .group_src = 0});
  std::string ranks;
  for (const int rank : group.ranks()) {
    ranks += (ranks.empty() ? "" : " ") + std::to_string(rank);
  }
  std::printf("%s: %s: rank %d, sum %d, first %d\n",
              group.name().c_str(),
              ranks.c_str(),
              group.rank(),
              total[0].item<int>(),
              first[0].item<int>());
}

// In the order of groups.py.
LOCKSTEP_PROCESS(groups) {
  init_process_group({.timeout = 30s, .interop = true});
  for (int i = 0; i < 2; ++i) {
    describe(new_group({1, 0, 2}, {.use_local_synchronization = true}));
  }
  describe(new_group({0, 1}));
  describe(new_group({2, 1}));
  describe(new_group({2, 0, 1}, {.sort_ranks = false}));
  describe(new_subgroups_by_enumeration({{0, 2}, {1}}).current);
  const auto gone = new_group();
  destroy_process_group(gone);
  describe(new_group());
  barrier();
  destroy_process_group();
  return 0;
}

/// What `rank` prints where all ranks are Python's, but for the hashes.
std::string expected(int rank) {
  const std::string all = ": 0 1 2: rank " + std::to_string(rank);
  const char* const numbered[] = {
      "1: 0 1: rank 0, sum 3, first 0\n",
      "1: 0 1: rank 1, sum 3, first 0\n2: 1 2: rank 0, sum 5, first 1\n",
      "2: 1 2: rank 1, sum 5, first 1\n"};
  const char* const mixed[] = {"3: 2 0 1: rank 1, sum 6, first 2\n",
                               "3: 2 0 1: rank 2, sum 6, first 2\n",
                               "3: 2 0 1: rank 0, sum 6, first 2\n"};
  const char* const divided[] = {"4: 0 2: rank 0, sum 4, first 0\n",
                                 "5: 1: rank 0, sum 2, first 1\n",
                                 "4: 0 2: rank 1, sum 4, first 0\n"};
  const std::string hashed = "HASH" + all + ", sum 6, first 0\n";
  return hashed + hashed + numbered[rank] + mixed[rank] + divided[rank] + "7" +
         all + ", sum 6, first 0\n";
}

std::string without_hashes(const std::string& text) {
  constexpr size_t kDigits = 40;
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    if (line.find(':') == kDigits) line.replace(0, kDigits, "HASH");
    result += line + '\n';
  }
  return result;
}

class GroupsWithPython : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(CppRank, GroupsWithPython, ::testing::Values(0, 1, 2));

TEST_P(GroupsWithPython, BothMakeTheSame) {
  const test::Command python = {
      .argv = {
          std::getenv("LOCKSTEP_PYTHON"),
          std::string(std::getenv("LOCKSTEP_PYTHON_SCRIPTS")) + "/groups.py"}};
  std::vector<test::Command> commands(3, python);
  commands[GetParam()] = test::at_entry("groups");
  test::Ranks ranks(std::move(commands));
  const auto results = ranks.wait(90s);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(results[rank].exit_code, 0) << results[rank];
    EXPECT_EQ(without_hashes(results[rank].out), expected(rank))
        << results[rank];
  }
}

}  // namespace
}  // namespace lockstep
