// Two hosts of two ranks: shared memory inside each, Gloo between them.

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "support/multiprocess.h"
#include "support/two_hosts.h"

namespace lockstep::test {
namespace {

constexpr int kRanks = 4;
constexpr auto kTimeout = 3000ms;

/// Bytes that have left this host so far.
int64_t bytes_sent() {
  std::ifstream file("/proc/net/dev");
  file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  int64_t sum = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string device;
    words >> device;
    if (device == "lo:") continue;
    int64_t value = 0;
    for (int column = 0; column < 9; ++column) words >> value;
    sum += value;
  }
  return sum;
}

/// How many bytes leave this host per byte of `call`, which moves `bytes`.
template <class Call>
double sent_per_byte(int64_t bytes, Call call) {
  barrier();
  const int64_t before = bytes_sent();
  call();
  barrier();
  return static_cast<double>(bytes_sent() - before) /
         static_cast<double>(bytes);
}

LOCKSTEP_PROCESS(count_bytes_between_hosts) {
  init_process_group({.timeout = 30s});
  int wrong = get_backend() == "hybrid" ? 0 : 1;
  constexpr int64_t kNumel = 4 << 20;
  auto tensor = torch::full({kNumel}, 1.0F + static_cast<float>(get_rank()));
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const double reduced = sent_per_byte(bytes, [&] { all_reduce(tensor); });
  wrong += tensor.eq(10).all().item<bool>() ? 0 : 2;
  // Each of two ranks sends its own to the other host once.
  auto all = torch::empty({kRanks * kNumel});
  const double gathered =
      sent_per_byte(2 * bytes, [&] { all_gather_into_tensor(all, tensor); });
  wrong += all.eq(10).all().item<bool>() ? 0 : 4;
  if (get_rank() % 2 == 0) {
    const auto once = [](double times) { return times > 0.5 && times <= 1.1; };
    std::printf("%s\n", once(reduced) && once(gathered) ? "once" : "other");
    std::fprintf(stderr, "all_reduce %f, all_gather %f\n", reduced, gathered);
  }
  destroy_process_group();
  return wrong;
}

LOCKSTEP_PROCESS(reduce_between_hosts_for_ever) {
  init_process_group({.timeout = kTimeout});
  try {
    auto tensor = torch::ones(1 << 18);
    for (int i = 0;; ++i) {
      all_reduce(tensor, {.op = ReduceOp::AVG});
      if (i == 3) std::puts("running");
      std::fflush(stdout);
    }
  } catch (const Error& error) {
    const auto* lost = dynamic_cast<const PeerLost*>(&error);
    const auto* late = dynamic_cast<const TimeoutError*>(&error);
    std::printf("%s", lost ? "lost" : late ? "timeout" : "another");
    for (const int peer : error.context().peers) std::printf(" %d", peer);
    std::puts(".");
    std::fprintf(stderr, "%s\n", error.what());
  }
  try {
    barrier();
    return 2;
  } catch (const Error&) {
  }
  destroy_process_group();
  return 0;
}

class HybridOnTwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.made()) GTEST_SKIP() << "no right to make network namespaces";
  }
  std::vector<Command> ranks_at(const std::string& entry) {
    std::vector<Command> commands;
    for (int rank = 0; rank < kRanks; ++rank) {
      commands.push_back(
          hosts_.on(rank / 2,
                    at_entry(entry,
                             {{"MASTER_ADDR", TwoHosts::address(0)},
                              {"LOCAL_RANK", std::to_string(rank % 2)},
                              {"LOCAL_WORLD_SIZE", "2"}})));
    }
    return commands;
  }
  /// All ranks but the victim, which gets `signal`, write `line` within
  /// `limit`.
  void expect_named(int victim,
                    int signal,
                    const std::string& line,
                    milliseconds limit) {
    SCOPED_TRACE(line);
    Ranks ranks(ranks_at("reduce_between_hosts_for_ever"));
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_TRUE(ranks[rank].wait_for_output("running\n"))
          << ranks[rank].wait(0ms);
    }
    ranks[victim].signal(signal);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(ranks[rank].wait_for_output(line, limit)) << "rank " << rank;
      const auto result = ranks[rank].wait(20s);
      EXPECT_EQ(result.exit_code, 0) << result;
      EXPECT_EQ(result.out, "running\n" + line) << result;
    }
    ranks[victim].signal(SIGKILL);
  }

 private:
  TwoHosts hosts_;
};

TEST_F(HybridOnTwoHosts, EachByteLeavesAHostOnce) {
  Ranks ranks(ranks_at("count_bytes_between_hosts"));
  int rank = 0;
  for (const auto& result : ranks.wait(60s)) {
    EXPECT_TRUE(result.ok()) << result;
    if (rank++ % 2 == 0) {
      EXPECT_EQ(result.out, "once\n") << result;
    }
  }
}

TEST_F(HybridOnTwoHosts, AKilledRankIsNamedOnBothHosts) {
  for (int victim = 0; victim < kRanks; ++victim) {
    expect_named(victim, SIGKILL, "lost " + std::to_string(victim) + ".\n", 2s);
  }
}

TEST_F(HybridOnTwoHosts, AStoppedRankIsNamedOnBothHosts) {
  // The first rank of a host answers for the others there: without it nobody
  // on the other host can tell which of them is stopped.
  for (const int victim : {1, 3}) {
    expect_named(victim,
                 SIGSTOP,
                 "timeout " + std::to_string(victim) + ".\n",
                 kTimeout + 3s);
  }
}

}  // namespace
}  // namespace lockstep::test
