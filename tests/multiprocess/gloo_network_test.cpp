#include <dirent.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "support/multiprocess.h"
#include "support/two_hosts.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// Inode numbers of this process's sockets.
std::set<std::string> own_sockets() {
  std::set<std::string> inodes;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    char target[PATH_MAX] = {};
    if (::readlink(entry.path().c_str(), target, sizeof target - 1) < 0) {
      continue;
    }
    unsigned long inode = 0;
    if (std::sscanf(target, "socket:[%lu]", &inode) == 1) {
      inodes.insert(std::to_string(inode));
    }
  }
  return inodes;
}

/// Addresses, as the kernel writes them, at which this process listens.
std::set<std::string> listening(const char* table) {
  const auto sockets = own_sockets();
  std::set<std::string> addresses;
  std::ifstream file(table);
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string number, local, remote, state, queues, timer, retransmits, uid;
    std::string timeout, inode;
    words >> number >> local >> remote >> state >> queues >> timer >>
        retransmits >> uid >> timeout >> inode;
    if (state == "0A" && sockets.count(inode) > 0) {
      addresses.insert(local.substr(0, local.find(':')));
    }
  }
  return addresses;
}

LOCKSTEP_PROCESS(sum_and_show_listeners) {
  try {
    init_process_group({.backend = "gloo", .timeout = 20s});
    auto tensor = torch::full({3}, get_rank() + 1);
    all_reduce(tensor);
    std::printf("sum %d\n", tensor[0].item<int>());
    for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
      for (const auto& address : listening(table)) {
        std::printf("listens %s\n", address.c_str());
      }
    }
    destroy_process_group();
    return 0;
  } catch (const InvalidArgument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 4;
  }
}

TEST(GlooNetwork, OneHostListensOnLoopbackOnly) {
  test::Ranks ranks(2, "sum_and_show_listeners");
  for (const auto& result : ranks.wait()) {
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(result.out, "sum 3\nlistens 0100007F\n") << result;
  }
}

TEST(GlooNetwork, AHostNameThatDoesNotResolveIsNoObstacle) {
  const std::vector<std::string> shell = {
      "unshare",
      "--uts",
      "sh",
      "-c",
      "hostname no-such-host && exec \"$@\"",
      "sh"};
  if (!test::run({.argv = {"unshare", "--uts", "hostname", "no-such-host"}})
           .ok()) {
    GTEST_SKIP() << "unshare --uts is not permitted here";
  }
  std::vector<test::Command> commands;
  for (int rank = 0; rank < 2; ++rank) {
    test::Command command = test::at_entry("sum_and_show_listeners");
    command.argv.insert(command.argv.begin(), shell.begin(), shell.end());
    commands.push_back(std::move(command));
  }
  test::Ranks ranks(std::move(commands));
  for (const auto& result : ranks.wait()) {
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(result.out, "sum 3\nlistens 0100007F\n") << result;
  }
}

TEST(GlooNetwork, RanksOfTwoHostsListenOnTheNetworkBetweenThem) {
  const test::TwoHosts hosts;
  if (!hosts.made()) GTEST_SKIP() << "may not make network namespaces";
  std::vector<test::Command> commands;
  for (int host = 0; host < 2; ++host) {
    commands.push_back(
        hosts.on(host,
                 test::at_entry("sum_and_show_listeners",
                                {{"MASTER_ADDR", test::TwoHosts::address(0)},
                                 {"LOCAL_RANK", "0"},
                                 {"LOCAL_WORLD_SIZE", "1"}})));
  }
  const auto results = test::Ranks(std::move(commands)).wait();
  EXPECT_EQ(results[0].out, "sum 3\nlistens 01004D0A\n") << results[0];
  EXPECT_EQ(results[1].out, "sum 3\nlistens 02004D0A\n") << results[1];
}

TEST(GlooNetwork, AnUnknownInterfaceIsRefusedOnEveryRank) {
  test::Ranks ranks(
      2, "sum_and_show_listeners", {{"GLOO_SOCKET_IFNAME", "eth99"}});
  for (const auto& result : ranks.wait()) {
    EXPECT_EQ(result.exit_code, 4) << result;
    EXPECT_NE(result.err.find("\"eth99\" is no interface of this host; present "
                              "are"),
              std::string::npos)
        << result;
  }
}

}  // namespace
}  // namespace lockstep
