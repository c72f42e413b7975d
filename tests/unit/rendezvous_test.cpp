#include "rendezvous/rendezvous.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"
#include "rendezvous/address.h"
#include "rendezvous/bounded_store.h"
#include "rendezvous/job_socket.h"
#include "rendezvous/open_stores.h"
#include "rendezvous/roll_call.h"
#include "rendezvous/url.h"
#include "support/environment.h"
#include "support/multiprocess.h"
#include "support/sockets.h"

namespace lockstep::rendezvous {
namespace {

using namespace std::chrono_literals;
using test::ScopedEnvironment;

using Variables = std::map<std::string, std::string>;

/// A job's variables and nothing else of the kind.
Variables only(Variables variables) {
  for (const char* name : {"RANK",
                           "WORLD_SIZE",
                           "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "MASTER_PORT",
                           "SLURM_PROCID",
                           "SLURM_NTASKS",
                           "SLURM_JOB_ID",
                           "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                           "PMIX_NAMESPACE"}) {
    variables.try_emplace(name, "");
  }
  return variables;
}

/// The text of the error of type E that `action` throws.
template <class E>
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another error: " << e.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Url, AllForms) {
  EXPECT_EQ(parse_url("env://").scheme, Url::Scheme::Env);
  const auto env = parse_url("env://?rank=1&world_size=2");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 2);
  const auto tcp = parse_url("tcp://node-1:29500?world_size=4");
  EXPECT_EQ(tcp.scheme, Url::Scheme::Tcp);
  EXPECT_EQ(tcp.host, "node-1");
  EXPECT_EQ(tcp.port, 29500);
  EXPECT_EQ(tcp.rank, std::nullopt);
  EXPECT_EQ(tcp.world_size, 4);
  EXPECT_EQ(parse_url("tcp://[::1]:80/").host, "::1");
  EXPECT_EQ(parse_url("file:///tmp/a?rank=0&use_libuv=1").path, "/tmp/a");
}

TEST(Url, WrongOnesAreShown) {
  for (const char* url : {"",
                          "tcp",
                          "udp://a:1",
                          "tcp://host",
                          "tcp://:80",
                          "tcp://host:0",
                          "tcp://host:65536",
                          "tcp://host:http",
                          "tcp://[::1]",
                          "file://relative/path",
                          "file://",
                          "env://?rank=-1",
                          "env://?rank=NaN",
                          "env://?world_size=0",
                          "env://?ranks=1"}) {
    const auto text = error_of<InvalidArgument>([&] { (void)parse_url(url); });
    EXPECT_HAS(text, '"' + std::string(url) + '"');
    EXPECT_HAS(text, "tcp://host:port");
  }
}

TEST(Place, NoVariablesIsAWorldOfOneWithoutSocketsAndThreads) {
  const ScopedEnvironment environment(only({}));
  const int sockets = test::open_sockets();
  const int threads = test::threads();
  init_process_group();
  EXPECT_EQ(get_rank(), 0);
  EXPECT_EQ(get_world_size(), 1);
  EXPECT_EQ(test::open_sockets(), sockets);
  EXPECT_EQ(test::threads(), threads);
  destroy_process_group();
}

TEST(Place, MasterAloneIsAWorldOfOneWithOneWarning) {
  const ScopedEnvironment environment(
      only({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}}));
  testing::internal::CaptureStderr();
  const auto joined = join({}, false, Deadline(1s));
  const auto output = testing::internal::GetCapturedStderr();
  EXPECT_EQ(joined.world_size, 1);
  EXPECT_HAS(output, "running as a world of one");
  EXPECT_EQ(std::count(output.begin(), output.end(), '\n'), 1) << output;
}

TEST(Place, EverythingMissingIsNamedAtOnce) {
  {
    const ScopedEnvironment environment(only({{"RANK", "0"}}));
    const auto text =
        error_of<InvalidArgument>([] { join({}, false, Deadline(1s)); });
    EXPECT_HAS(text, "WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set");
    EXPECT_HAS(text, "lockstep run");
  }
  {
    const ScopedEnvironment environment(only({{"WORLD_SIZE", "2"},
                                              {"MASTER_ADDR", "127.0.0.1"},
                                              {"MASTER_PORT", "29500"}}));
    EXPECT_HAS(error_of<InvalidArgument>([] { join({}, false, Deadline(1s)); }),
               "RANK is not set");
  }
  {
    const ScopedEnvironment environment(
        only({{"RANK", "1"}, {"WORLD_SIZE", "2"}}));
    EXPECT_HAS(error_of<InvalidArgument>([] { join({}, false, Deadline(1s)); }),
               "MASTER_ADDR and MASTER_PORT are not set");
  }
  {
    const ScopedEnvironment environment(only({}));
    EXPECT_HAS(
        error_of<InvalidArgument>([] {
          join({.init_method = "tcp://127.0.0.1:29500"}, false, Deadline(1s));
        }),
        "RANK and WORLD_SIZE are not set");
  }
  {
    const ScopedEnvironment environment(
        only({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}));
    EXPECT_HAS(error_of<InvalidArgument>([] { join({}, false, Deadline(1s)); }),
               "Slurm job");
  }
}

TEST(Place, BadValuesAreRefusedBeforeTheNetwork) {
  const Variables master = {{"MASTER_ADDR", "no-such-host.invalid"},
                            {"MASTER_PORT", "29500"}};
  const std::vector<std::pair<Variables, std::string>> cases = {
      {{{"RANK", "0"}, {"WORLD_SIZE", "NaN"}}, "WORLD_SIZE=\"NaN\""},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK=\"-1\""},
      {{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "rank 2 is outside"},
  };
  for (auto [variables, expected] : cases) {
    variables.insert(master.begin(), master.end());
    const ScopedEnvironment environment(only(variables));
    EXPECT_HAS(error_of<InvalidArgument>([] { init_process_group(); }),
               expected);
  }
  const ScopedEnvironment environment(only(master));
  EXPECT_HAS(error_of<InvalidArgument>(
                 [] { init_process_group({.world_size = 2, .rank = 5}); }),
             "rank 5 is outside a world of 2");
  EXPECT_HAS(error_of<InvalidArgument>(
                 [] { init_process_group({.world_size = -2, .rank = 0}); }),
             "world_size is -2");
  EXPECT_HAS(error_of<InvalidArgument>([] {
               init_process_group({.timeout = 0ms, .world_size = 2, .rank = 0});
             }),
             "timeout");
}

TEST(Place, ArgumentsAndEnvironmentMustAgree) {
  const ScopedEnvironment environment(only({{"RANK", "1"},
                                            {"WORLD_SIZE", "2"},
                                            {"MASTER_ADDR", "127.0.0.1"},
                                            {"MASTER_PORT", "29500"}}));
  EXPECT_HAS(
      error_of<InvalidArgument>([] { join({.rank = 0}, false, Deadline(1s)); }),
      "rank is 0 by argument but 1 by RANK and WORLD_SIZE");
  EXPECT_HAS(error_of<InvalidArgument>([] {
               join(
                   {.init_method = "env://?world_size=3"}, false, Deadline(1s));
             }),
             "world_size is 3 by init_method but 2 by RANK and WORLD_SIZE");
}

TEST(Place, OneJobOnSeveralHostsNeedsAMaster) {
  const ScopedEnvironment environment(
      only({{"OMPI_COMM_WORLD_RANK", "0"},
            {"OMPI_COMM_WORLD_SIZE", "4"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
            {"PMIX_NAMESPACE", "several-hosts"}}));
  EXPECT_HAS(error_of<InvalidArgument>([] { join({}, false, Deadline(1s)); }),
             "several hosts");
}

TEST(Address, PortTakenNamesAddressAndRemedy) {
  const Deadline deadline(5s);
  const Fd first = bind_to("127.0.0.1", 0, deadline);
  const auto endpoint = bound_endpoint(first.get());
  EXPECT_EQ(endpoint.host, "127.0.0.1");
  const auto text = error_of<StoreError>(
      [&] { bind_to("localhost", endpoint.port, deadline); });
  EXPECT_HAS(text, "localhost:" + std::to_string(endpoint.port));
  EXPECT_HAS(text, "in use");
  EXPECT_HAS(text, "choose another MASTER_PORT");
}

TEST(Address, OnlyOwnAddressesAreBound) {
  // 192.0.2.0/24 is reserved for documentation.
  EXPECT_HAS(
      error_of<StoreError>([] { bind_to("192.0.2.1", 29500, Deadline(5s)); }),
      "no address of this machine");
}

TEST(Address, UnknownHostIsNamed) {
  EXPECT_HAS(error_of<StoreError>([] {
               find_listener("no-such-host.invalid", 29500, Deadline(500ms));
             }),
             "\"no-such-host.invalid\"");
}

TEST(Address, NobodyThereEndsAtTheDeadline) {
  uint16_t port = 0;
  const Fd reserved = test::reserve_port(port);
  const auto start = Clock::now();
  EXPECT_HAS(error_of<TimeoutError>(
                 [&] { find_listener("127.0.0.1", port, Deadline(300ms)); }),
             "127.0.0.1:" + std::to_string(port));
  EXPECT_GE(Clock::now() - start, 300ms);
  EXPECT_LE(Clock::now() - start, 1300ms);
}

TEST(Address, AListenerIsFoundUnderEveryNameOfItsAddress) {
  const Fd listener = bind_to("localhost", 0, Deadline(5s));
  const auto endpoint = bound_endpoint(listener.get());
  for (const std::string& name : {endpoint.host, std::string("localhost")}) {
    EXPECT_EQ(find_listener(name, endpoint.port, Deadline(5s)).host,
              endpoint.host);
  }
}

// ---------------------------------------------------------------- roll call

/// Runs one thread for each entry of `ranks`; the error texts, "" where none.
std::vector<std::string> call_roll(
    const std::vector<int>& ranks,
    int world_size,
    const std::function<std::string(int index)>& versions,
    std::chrono::milliseconds timeout = 20s) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        roll_call(*store,
                  ranks[i],
                  world_size,
                  timeout,
                  versions(static_cast<int>(i)));
      } catch (const MismatchError& e) {
        errors[i] = std::string("mismatch ") + e.what();
      } catch (const InvalidArgument& e) {
        errors[i] = std::string("argument ") + e.what();
      } catch (const TimeoutError& e) {
        errors[i] = std::string("timeout ") + e.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

std::string same_versions(int /*index*/) {
  return own_versions();
}

TEST(RollCall, AllThere) {
  for (const auto& error : call_roll({0, 1, 2, 3, 4}, 5, same_versions)) {
    EXPECT_EQ(error, "");
  }
}

TEST(RollCall, DifferentVersionsNameBothRanksEverywhere) {
  const auto errors = call_roll({0, 1, 2}, 3, [](int i) {
    return i == 2 ? std::string("libtorch 2.12.0 and Lockstep 0.1.0")
                  : own_versions();
  });
  for (const auto& error : errors) {
    EXPECT_HAS(error, "mismatch ");
    EXPECT_HAS(error, "rank 0 (");
    EXPECT_HAS(error, own_versions());
    EXPECT_HAS(error, "rank 2 (");
    EXPECT_HAS(error, "libtorch 2.12.0 and Lockstep 0.1.0");
  }
}

TEST(RollCall, ARankThatIsThereTwiceEndsTheWaitOfAll) {
  for (const auto& error : call_roll({0, 1, 1}, 3, same_versions)) {
    EXPECT_HAS(error, "argument ");
    EXPECT_HAS(error, "rank 1 is there twice");
  }
}

TEST(RollCall, AbsentRanksAreNamedByAll) {
  for (const auto& error : call_roll({0, 2}, 4, same_versions, 300ms)) {
    EXPECT_HAS(error, "timeout ");
    EXPECT_HAS(error, "ranks 1 3 did not arrive");
  }
}

TEST(RollCall, WhoComesToACallThatIsOverBelongsToTheNext) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_FALSE(roll_call_is_over(*store, 1));
  EXPECT_THROW(roll_call(*store, 0, 2, 50ms), TimeoutError);
  EXPECT_TRUE(roll_call_is_over(*store, 1));
}

TEST(RollCall, RankZeroStaysUntilTheOthersHaveReadABadVerdict) {
  const c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<c10d::HashStore>();
  store->set("lockstep/rank/1", "another version\nsomebody\n0");
  std::thread slow([&] {
    store->wait({"lockstep/verdict"}, 10s);
    std::this_thread::sleep_for(200ms);
    store->add("lockstep/readers", 1);
  });
  EXPECT_THROW(roll_call(*store, 0, 2, 10s), MismatchError);
  EXPECT_EQ(store->add("lockstep/readers", 0), 1);
  slow.join();
}

// -------------------------------------------------------------- generations

TEST(Generation, RankZerosCountIsTold) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const Deadline deadline(20s);
  keep_store("told#0", store);
  keep_store("told#1", store);
  EXPECT_EQ(next_generation("told#0", 0, store, deadline), 0);
  EXPECT_EQ(next_generation("told#1", 1, store, deadline), 0);
  EXPECT_EQ(next_generation("told#1", 1, store, deadline), 1);
  EXPECT_EQ(next_generation("told#0", 0, store, deadline), 1);
  forget_store("told#1");
  EXPECT_EQ(next_generation("told#1", 1, store, deadline), 1);
  forget_store("told#0");
  forget_store("told#1");
}

TEST(Generation, ALateRankComesToTheAttemptThatIsUnderWay) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const Deadline deadline(20s);
  EXPECT_EQ(next_generation("late#0", 0, store, deadline), 0);
  EXPECT_THROW(roll_call(*group_store(store, 0), 0, 2, 50ms), TimeoutError);
  EXPECT_EQ(next_generation("late#1", 1, store, deadline), 1);
  EXPECT_EQ(next_generation("late#0", 0, store, deadline), 1);
  forget_store("late#0");
  forget_store("late#1");
}

TEST(Generation, WithoutRankZeroTheWaitEnds) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_HAS(error_of<TimeoutError>(
                 [&] { next_generation("none#1", 1, store, Deadline(50ms)); }),
             "rank 0 did not arrive");
}

// ------------------------------------------------------------ bounded store

/// Answers once it is told to.
class SilentStore : public c10d::HashStore {
 public:
  explicit SilentStore(std::shared_future<void> told) : told_(told) {}
  bool check(const std::vector<std::string>& keys) override {
    told_.wait();
    return HashStore::check(keys);
  }

 private:
  std::shared_future<void> told_;
};

TEST(BoundedStore, ASilentStoreIsGivenUpAtTheDeadline) {
  std::promise<void> tell;
  const auto store = c10::make_intrusive<BoundedStore>(
      c10::make_intrusive<SilentStore>(tell.get_future().share()),
      Deadline(50ms),
      ErrorContext{.operation = "init_process_group", .rank = 1});
  store->set("a", "1");
  EXPECT_EQ(store->get_to_str("a"), "1");
  for (int i = 0; i < 2; ++i) {
    EXPECT_HAS(error_of<StoreError>([&] { store->check({"a"}); }),
               "does not answer");
  }
  tell.set_value();
}

TEST(BoundedStore, WithoutTheBoundItIsTheStore) {
  const auto below = c10::make_intrusive<c10d::HashStore>();
  const auto store =
      c10::make_intrusive<BoundedStore>(below, Deadline(0ms), ErrorContext{});
  store->lift_bound();
  store->set("a", "1");
  EXPECT_TRUE(below->check({"a"}));
  EXPECT_EQ(store->getUnderlyingNonPrefixStore(), below);
}

// --------------------------------------------------------------- job socket

TEST(JobSocket, RankZeroHandsOutItsPort) {
  const Deadline deadline(20s);
  std::vector<uint16_t> ports(4);
  std::vector<std::thread> threads;
  for (int rank = 1; rank < 4; ++rank) {
    threads.emplace_back(
        [&, rank] { ports[rank] = ask_for_port("unit-job", rank, deadline); });
  }
  hand_out_port("unit-job", 4, 4711, deadline);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ports, (std::vector<uint16_t>{0, 4711, 4711, 4711}));
}

TEST(JobSocket, ARankThatComesTwiceIsRefused) {
  const Deadline deadline(20s);
  std::thread first([&] { (void)ask_for_port("unit-two", 1, deadline); });
  std::thread second([&] { (void)ask_for_port("unit-two", 1, deadline); });
  EXPECT_HAS(error_of<InvalidArgument>(
                 [&] { hand_out_port("unit-two", 3, 4711, deadline); }),
             "rank 1 of job unit-two came twice");
  first.join();
  second.join();
}

TEST(JobSocket, TwoJobsDoNotMeet) {
  const Deadline deadline(20s);
  uint16_t of_a = 0;
  uint16_t of_b = 0;
  std::thread a([&] { of_a = ask_for_port("unit-a", 1, deadline); });
  std::thread b([&] { of_b = ask_for_port("unit-b", 1, deadline); });
  hand_out_port("unit-a", 2, 1111, deadline);
  hand_out_port("unit-b", 2, 2222, deadline);
  a.join();
  b.join();
  EXPECT_EQ(of_a, 1111);
  EXPECT_EQ(of_b, 2222);
}

TEST(JobSocket, BothSidesNameWhoIsMissing) {
  EXPECT_HAS(error_of<TimeoutError>(
                 [] { hand_out_port("unit-empty", 3, 1, Deadline(200ms)); }),
             "ranks 1 2 of job unit-empty");
  EXPECT_HAS(error_of<TimeoutError>(
                 [] { ask_for_port("unit-nobody", 1, Deadline(200ms)); }),
             "rank 0 of job unit-nobody");
}

}  // namespace
}  // namespace lockstep::rendezvous
