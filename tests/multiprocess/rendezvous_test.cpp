#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "comm/backend_registry.h"
#include "core/env.h"
#include "core/failure.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "rendezvous/address.h"
#include "support/multiprocess.h"
#include "support/sockets.h"

namespace lockstep::test {
namespace {

// Exit codes of the entries below.
constexpr int kInvalidArgument = 11;
constexpr int kStoreError = 12;
constexpr int kTimeoutError = 13;
constexpr int kPeerLost = 14;
constexpr int kOtherError = 19;

/// Runs an entry's body; errors go to stderr and into the exit code.
template <class Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const InvalidArgument& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return kInvalidArgument;
  } catch (const StoreError& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return kStoreError;
  } catch (const TimeoutError& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return kTimeoutError;
  } catch (const PeerLost& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return kPeerLost;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return kOtherError;
  }
}

InitOptions options_from_environment() {
  return {.init_method = env::get("TEST_INIT_METHOD").value_or(""),
          .timeout =
              milliseconds(env::get_int("TEST_TIMEOUT_MS").value_or(30'000))};
}

/// Sum of the ranks by all_reduce: rank + 1 from each.
int64_t sum_of_ranks() {
  auto tensor = torch::full({3}, get_rank() + 1, torch::kLong);
  all_reduce(tensor);
  return tensor[2].item<int64_t>();
}

LOCKSTEP_PROCESS(meet) {
  return guarded([] {
    init_process_group(options_from_environment());
    std::printf("rank %d of %d, local %d of %d, sum %ld\n",
                get_rank(),
                get_world_size(),
                get_local_rank(),
                get_local_world_size(),
                sum_of_ranks());
    destroy_process_group();
    return 0;
  });
}

LOCKSTEP_PROCESS(meet_three_times) {
  return guarded([] {
    for (int i = 0; i < 3; ++i) {
      init_process_group(options_from_environment());
      if (sum_of_ranks() != 6) return 1;
      destroy_process_group();
    }
    return 0;
  });
}

LOCKSTEP_PROCESS(print_listeners) {
  return guarded([] {
    init_process_group({.backend = env::get("TEST_BACKEND").value_or(""),
                        .interop = env::get_bool("TEST_INTEROP")});
    barrier();
    std::printf("listening: %zu\n", listeners().size());
    for (const auto& address : listeners_off_loopback()) {
      std::printf("reachable: %s\n", address.c_str());
    }
    barrier();
    destroy_process_group();
    return 0;
  });
}

/// Rank 0 ends after its last collective; the others use the store later.
LOCKSTEP_PROCESS(rank_0_leaves_first) {
  return guarded([] {
    init_process_group();
    const auto store = get_group()->getStore();
    if (get_rank() == 0) store->set("late", "still here");
    barrier();
    if (get_rank() != 0) {
      std::this_thread::sleep_for(300ms);
      if (store->get_to_str("late") != "still here") return 1;
    }
    if (env::get_bool("TEST_DESTROY").value_or(true)) destroy_process_group();
    return 0;
  });
}

/// Rank 0, which serves the store, stops while it waits for rank 2.
LOCKSTEP_PROCESS(rank_0_stops_meanwhile) {
  if (env::get("RANK") == "0") {
    std::thread([] {
      const auto port = std::stoi(env::get("MASTER_PORT").value());
      rendezvous::find_listener(
          "127.0.0.1", static_cast<uint16_t>(port), Deadline(10s));
      std::this_thread::sleep_for(300ms);
      ::kill(::getpid(), SIGSTOP);
    }).detach();
  }
  return guarded([] {
    init_process_group(options_from_environment());
    return 0;
  });
}

LOCKSTEP_PROCESS(rank_0_leaves_at_once) {
  return guarded([] {
    init_process_group();
    destroy_process_group();
    return 0;
  });
}

/// A first attempt that ends before rank 1 is started, then another one.
LOCKSTEP_PROCESS(rank_0_tries_twice) {
  return guarded([] {
    try {
      init_process_group({.timeout = 300ms});
      return 1;
    } catch (const TimeoutError&) {
    }
    std::printf("again\n");
    std::fflush(stdout);
    init_process_group();
    const bool right = sum_of_ranks() == 3;
    destroy_process_group();
    return right ? 0 : 2;
  });
}

/// Meets one rank 0, and then another one that took its place.
LOCKSTEP_PROCESS(meet_two_ranks_0) {
  return guarded([] {
    init_process_group();
    destroy_process_group();
    // Rank 0's process ends now, with the store.
    std::printf("once\n");
    std::fflush(stdout);
    std::this_thread::sleep_for(500ms);
    try {
      init_process_group();
    } catch (const StoreError&) {
      init_process_group();
    }
    const bool right = sum_of_ranks() == 3;
    destroy_process_group();
    return right ? 0 : 2;
  });
}

/// The forked child of rank 1 has no group; the ranks go on without it.
LOCKSTEP_PROCESS(rank_1_forks) {
  return guarded([] {
    init_process_group();
    if (get_rank() == 1) {
      const pid_t child = ::fork();
      if (child == 0) {
        std::exit(guarded([] {
          const bool had_group = is_initialized();
          destroy_process_group();
          barrier();
          return had_group ? 1 : 2;
        }));
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      std::printf("child %d\n", WEXITSTATUS(status));
    }
    const bool right = sum_of_ranks() == 3;
    destroy_process_group();
    return right ? 0 : 2;
  });
}

/// Rank 1 cannot make its backend.
LOCKSTEP_PROCESS(rank_1_has_no_memory) {
  comm::register_backend(
      "greedy",
      [](const comm::BackendContext&) -> c10::intrusive_ptr<c10d::Backend> {
        throw BackendError("no memory for the segment");
      });
  return guarded([] {
    init_process_group({.backend = env::get("RANK") == "1" ? "greedy" : ""});
    return 0;
  });
}

/// Rank 1 ends as a spawned child does whose function threw.
LOCKSTEP_PROCESS(rank_1_fails) {
  return guarded([] {
    init_process_group();
    barrier();
    if (get_rank() == 1) {
      announce_failure("the disk is full");
      std::exit(1);
    }
    barrier();
    return 0;
  });
}

void expect_all_met(const std::vector<Result>& results) {
  const int n = static_cast<int>(results.size());
  for (int rank = 0; rank < n; ++rank) {
    EXPECT_TRUE(results[rank].ok()) << results[rank];
    const std::string place = std::to_string(rank) + " of " + std::to_string(n);
    EXPECT_EQ(results[rank].out,
              "rank " + place + ", local " + place + ", sum " +
                  std::to_string(n * (n + 1) / 2) + "\n");
    EXPECT_EQ(results[rank].err, "");
  }
}

/// An environment without a launcher's variables but those given.
Environment bare(Environment environment) {
  for (const char* name : {"RANK",
                           "WORLD_SIZE",
                           "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "MASTER_PORT"}) {
    environment.try_emplace(name, "");
  }
  return environment;
}

/// Processes at one entry with the given environments.
std::vector<Result> run_all(const std::string& entry,
                            const std::vector<Environment>& environments,
                            milliseconds timeout = 60s) {
  std::vector<Process> processes;
  processes.reserve(environments.size());
  for (const auto& environment : environments) {
    processes.emplace_back(at_entry(entry, environment));
  }
  std::vector<Result> results;
  for (auto& process : processes) results.push_back(process.wait(timeout));
  return results;
}

class Worlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, testing::Values(1, 2, 3));

TEST_P(Worlds, MeetByEnvironment) {
  Ranks ranks(GetParam(), "meet");
  expect_all_met(ranks.wait());
}

TEST_P(Worlds, MeetByTcpUrl) {
  const int n = GetParam();
  uint16_t port = 0;
  const Fd reserved = reserve_port(port);
  std::vector<Environment> environments;
  for (int rank = 0; rank < n; ++rank) {
    environments.push_back(bare({{"TEST_INIT_METHOD",
                                  "tcp://127.0.0.1:" + std::to_string(port) +
                                      "?rank=" + std::to_string(rank) +
                                      "&world_size=" + std::to_string(n)}}));
  }
  expect_all_met(run_all("meet", environments));
}

TEST_P(Worlds, MeetByFile) {
  const int n = GetParam();
  const TempDir folder;
  std::vector<Environment> environments;
  for (int rank = 0; rank < n; ++rank) {
    environments.push_back(
        bare({{"TEST_INIT_METHOD", "file://" + (folder / "store")},
              {"RANK", std::to_string(rank)},
              {"WORLD_SIZE", std::to_string(n)}}));
  }
  expect_all_met(run_all("meet", environments));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST_P(Worlds, MeetByJobName) {
  const int n = GetParam();
  // Two jobs at the same time, each under its own name.
  std::vector<Environment> environments;
  for (const char* job : {"first", "second"}) {
    for (int rank = 0; rank < n; ++rank) {
      environments.push_back(
          bare({{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                {"OMPI_COMM_WORLD_SIZE", std::to_string(n)},
                {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
                {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(n)},
                {"PMIX_NAMESPACE", job + std::to_string(::getpid())}}));
    }
  }
  const auto results = run_all("meet", environments);
  expect_all_met({results.begin(), results.begin() + n});
  expect_all_met({results.begin() + n, results.end()});
}

TEST_P(Worlds, MeetBySlurmStep) {
  // Two steps of one job at the same time.
  const int n = GetParam();
  std::vector<Environment> environments;
  for (const char* step : {"0", "1"}) {
    for (int rank = 0; rank < n; ++rank) {
      environments.push_back(bare({{"SLURM_PROCID", std::to_string(rank)},
                                   {"SLURM_LOCALID", std::to_string(rank)},
                                   {"SLURM_STEP_NUM_TASKS", std::to_string(n)},
                                   {"SLURM_STEP_NUM_NODES", "1"},
                                   {"SLURM_JOB_ID", std::to_string(::getpid())},
                                   {"SLURM_STEP_ID", step}}));
    }
  }
  const auto results = run_all("meet", environments);
  expect_all_met({results.begin(), results.begin() + n});
  expect_all_met({results.begin() + n, results.end()});
}

TEST(Rendezvous, NamesOfOneAddressMeet) {
  for (const auto& [first, second] :
       {std::pair{"localhost", "127.0.0.1"}, {"127.0.0.1", "localhost"}}) {
    Ranks ranks({at_entry("meet", {{"MASTER_ADDR", first}}),
                 at_entry("meet", {{"MASTER_ADDR", second}})});
    expect_all_met(ranks.wait());
  }
}

TEST(Rendezvous, SuccessiveGroupsUseOneStore) {
  Ranks ranks(3, "meet_three_times");
  for (const auto& result : ranks.wait()) {
    EXPECT_TRUE(result.ok()) << result;
    EXPECT_EQ(result.err, "");
  }
}

TEST(Rendezvous, RankZeroServesTheSocketThatItInherits) {
  uint16_t port = 0;
  const Fd reserved = reserve_port(port);
  ::fcntl(reserved.get(), F_SETFD, 0);
  const Environment common = {{"WORLD_SIZE", "2"},
                              {"LOCAL_RANK", ""},
                              {"LOCAL_WORLD_SIZE", ""},
                              {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", std::to_string(port)}};
  Environment zero = common;
  zero["RANK"] = "0";
  zero["LOCKSTEP_MASTER_FD"] = std::to_string(reserved.get());
  Environment one = common;
  one["RANK"] = "1";
  expect_all_met(run_all("meet", {zero, one}));
}

TEST(Rendezvous, AnAgentsStoreIsJoinedByAll) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  for (const char* restarts : {"0", "1"}) {
    const Environment agent = {
        {"TORCHELASTIC_USE_AGENT_STORE", "True"},
        {"TORCHELASTIC_RESTART_COUNT", restarts},
        {"MASTER_PORT", std::to_string(store->getPort())}};
    Ranks ranks(2, "meet", agent);
    expect_all_met(ranks.wait());
  }
}

TEST(Rendezvous, PortTaken) {
  const Fd taken = rendezvous::bind_to("127.0.0.1", 0, Deadline(5s));
  const auto port =
      std::to_string(rendezvous::bound_endpoint(taken.get()).port);
  Ranks ranks(1, "meet", {{"WORLD_SIZE", "2"}, {"MASTER_PORT", port}});
  const auto result = ranks.wait(10s)[0];
  EXPECT_EQ(result.exit_code, kStoreError) << result;
  EXPECT_NE(result.err.find("127.0.0.1:" + port), std::string::npos) << result;
}

TEST(Rendezvous, WhatListensButIsNoStoreIsNamed) {
  const Fd mute = rendezvous::bind_to("127.0.0.1", 0, Deadline(5s));
  const auto port = std::to_string(rendezvous::bound_endpoint(mute.get()).port);
  Process rank(at_entry("meet",
                        bare({{"RANK", "1"},
                              {"WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", port},
                              {"TEST_TIMEOUT_MS", "1000"}})));
  const auto result = rank.wait(10s);
  EXPECT_EQ(result.exit_code, kStoreError) << result;
  EXPECT_NE(result.err.find("127.0.0.1:" + port + " does not answer"),
            std::string::npos)
      << result;
}

TEST(Rendezvous, AStoppedRankZeroDoesNotHoldTheOthers) {
  Ranks ranks(2,
              "rank_0_stops_meanwhile",
              {{"WORLD_SIZE", "3"}, {"TEST_TIMEOUT_MS", "2000"}});
  const auto result = ranks[1].wait(15s);
  EXPECT_EQ(result.exit_code, kStoreError) << result;
  EXPECT_NE(result.err.find(" does not answer"), std::string::npos) << result;
  ranks[0].signal(SIGKILL);
}

TEST(Rendezvous, ALateRankMeetsTheSecondAttempt) {
  uint16_t port = 0;
  const Fd reserved = reserve_port(port);
  const auto rank = [&](const char* entry, const char* number) {
    return at_entry(entry,
                    bare({{"RANK", number},
                          {"WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "127.0.0.1"},
                          {"MASTER_PORT", std::to_string(port)}}));
  };
  Process zero(rank("rank_0_tries_twice", "0"));
  ASSERT_TRUE(zero.wait_for_output("again"));
  Process one(rank("meet", "1"));
  for (auto* process : {&zero, &one}) {
    const auto result = process->wait();
    EXPECT_TRUE(result.ok()) << result;
  }
}

TEST(Rendezvous, AnotherRankZeroCanTakeTheFirstOnesPlace) {
  uint16_t port = 0;
  const Fd reserved = reserve_port(port);
  const auto rank = [&](const char* entry, const char* number) {
    return at_entry(entry,
                    bare({{"RANK", number},
                          {"WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "127.0.0.1"},
                          {"MASTER_PORT", std::to_string(port)}}));
  };
  Process first(rank("rank_0_leaves_at_once", "0"));
  Process one(rank("meet_two_ranks_0", "1"));
  EXPECT_TRUE(first.wait().ok());
  ASSERT_TRUE(one.wait_for_output("once"));
  Process second(rank("meet", "0"));
  for (auto* process : {&second, &one}) {
    const auto result = process->wait();
    EXPECT_TRUE(result.ok()) << result;
  }
}

TEST(Rendezvous, ARankThatFailsWithinInitTellsWhy) {
  Ranks ranks(3, "rank_1_has_no_memory");
  const auto results = ranks.wait();
  EXPECT_EQ(results[1].exit_code, kOtherError) << results[1];
  EXPECT_EQ(results[1].err,
            "[lockstep rank 1/3] init_process_group: no memory for the "
            "segment\n");
  for (const int rank : {0, 2}) {
    EXPECT_EQ(results[rank].exit_code, kPeerLost) << results[rank];
    EXPECT_NE(results[rank].err.find("failed: no memory for the segment"),
              std::string::npos)
        << results[rank];
  }
}

TEST(Rendezvous, AForkedChildHasNoGroupAndHarmsNone) {
  Ranks ranks(2, "rank_1_forks");
  const auto results = ranks.wait(20s);
  for (const auto& result : results) EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(results[1].out, "child " + std::to_string(kInvalidArgument) + "\n");
  EXPECT_NE(results[1].err.find("forked from rank 1"), std::string::npos)
      << results[1];
}

TEST(Rendezvous, UnknownHost) {
  Ranks ranks(
      2,
      "meet",
      {{"MASTER_ADDR", "no-such-host.invalid"}, {"TEST_TIMEOUT_MS", "1000"}});
  for (const auto& result : ranks.wait(10s)) {
    EXPECT_EQ(result.exit_code, kStoreError) << result;
    EXPECT_NE(result.err.find("\"no-such-host.invalid\""), std::string::npos)
        << result;
  }
}

TEST(Rendezvous, AbsentRankIsNamedByAll) {
  Ranks ranks(2, "meet", {{"WORLD_SIZE", "3"}, {"TEST_TIMEOUT_MS", "1500"}});
  for (const auto& result : ranks.wait(15s)) {
    EXPECT_EQ(result.exit_code, kTimeoutError) << result;
    EXPECT_NE(result.err.find("rank 2 did not arrive"), std::string::npos)
        << result;
  }
}

TEST(Rendezvous, RankOneTwice) {
  Ranks ranks({at_entry("meet", {{"WORLD_SIZE", "3"}}),
               at_entry("meet", {{"WORLD_SIZE", "3"}}),
               at_entry("meet", {{"WORLD_SIZE", "3"}, {"RANK", "1"}})});
  for (const auto& result : ranks.wait(15s)) {
    EXPECT_EQ(result.exit_code, kInvalidArgument) << result;
    EXPECT_NE(result.err.find("rank 1 is there twice"), std::string::npos)
        << result;
  }
}

TEST(Rendezvous, RankZeroTwice) {
  Ranks ranks({at_entry("meet", {{"TEST_TIMEOUT_MS", "3000"}}),
               at_entry("meet", {{"TEST_TIMEOUT_MS", "3000"}, {"RANK", "0"}})});
  const auto results = ranks.wait(15s);
  int refused = 0;
  for (const auto& result : results) {
    EXPECT_NE(result.exit_code, 0) << result;
    refused +=
        result.exit_code == kStoreError &&
        result.err.find("another process with RANK=0") != std::string::npos;
  }
  EXPECT_EQ(refused, 1) << results[0] << results[1];
}

TEST(Rendezvous, NothingIsReachableFromOutside) {
  std::vector<Environment> kinds = {{}};
  for (const auto& name : comm::available_backends()) {
    if (name != "gloo") continue;
    kinds.push_back({{"TEST_BACKEND", "gloo"}});
    kinds.push_back({{"TEST_INTEROP", "1"}});
  }
  for (const auto& kind : kinds) {
    Ranks ranks(2, "print_listeners", kind);
    const auto results = ranks.wait();
    for (const auto& result : results) {
      EXPECT_TRUE(result.ok()) << result;
      EXPECT_EQ(result.out.find("reachable"), std::string::npos) << result;
    }
    // Rank 0 serves the store, so the look at /proc sees something.
    EXPECT_EQ(results[0].out.find("listening: 0"), std::string::npos)
        << results[0];
  }
}

class RankZeroFirst : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Destroy, RankZeroFirst, testing::Values("1", "0"));

TEST_P(RankZeroFirst, TheStoreOutlivesIt) {
  for (int round = 0; round < 3; ++round) {
    Ranks ranks(3, "rank_0_leaves_first", {{"TEST_DESTROY", GetParam()}});
    for (const auto& result : ranks.wait()) {
      EXPECT_TRUE(result.ok()) << result;
      EXPECT_EQ(result.err, "");
    }
  }
}

TEST(End, AFailureThatWasAnnouncedReachesTheOthers) {
  Ranks ranks(3, "rank_1_fails");
  const auto results = ranks.wait();
  EXPECT_EQ(results[1].exit_code, 1) << results[1];
  for (const int rank : {0, 2}) {
    EXPECT_EQ(results[rank].exit_code, kPeerLost) << results[rank];
    EXPECT_NE(results[rank].err.find("the disk is full"), std::string::npos)
        << results[rank];
  }
}

TEST(Mpirun, TwoJobsAtOnceEachMeetAlone) {
  if (run({.argv = {"mpirun", "--version"}}).exit_code != 0) {
    GTEST_SKIP() << "mpirun is not installed";
  }
  const Command meet = at_entry("meet", bare({}));
  Command command = {
      .argv = {"mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none"},
      .env = meet.env};
  command.argv.insert(command.argv.end(), meet.argv.begin(), meet.argv.end());
  command.env["OMPI_ALLOW_RUN_AS_ROOT"] = "1";
  command.env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1";
  Process first(command);
  Process second(command);
  for (auto* job : {&first, &second}) {
    const auto result = job->wait();
    EXPECT_TRUE(result.ok()) << result;
    for (const char* line : {"rank 0 of 2, local 0 of 2, sum 3\n",
                             "rank 1 of 2, local 1 of 2, sum 3\n"}) {
      EXPECT_NE(result.out.find(line), std::string::npos) << result;
    }
  }
}

}  // namespace
}  // namespace lockstep::test
