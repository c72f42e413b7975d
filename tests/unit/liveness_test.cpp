#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "comm/liveness.h"
#include "comm/liveness/cores.h"
#include "comm/liveness/place.h"
#include "comm/liveness/records.h"
#include "comm/liveness/watcher.h"
#include "support/threads.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr new_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

/// Runs `body(rank, liveness)` on one thread per rank, whose hosts are
/// `host_of(rank)`.
void on_ranks(
    int n,
    const std::function<void(int, Liveness&)>& body,
    const std::function<int(int)>& host_of = [](int) { return 0; }) {
  const auto store = new_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto liveness =
            liveness::start(store, rank, n, 30s, [&](int other) {
              return host_of(other) == host_of(rank);
            });
        body(rank, *liveness);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

template <class Condition>
bool soon(Condition condition) {
  const Deadline deadline(10s);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

/// A barrier of threads that needs no group.
class Meeting {
 public:
  explicit Meeting(int n) : n_(n) {}
  bool wait() {
    const int turn = arrived_.fetch_add(1) / n_ + 1;
    return soon([&] { return arrived_ >= turn * n_; });
  }

 private:
  const int n_;
  std::atomic<int> arrived_{0};
};

int memfd_with(const std::string& text) {
  const int fd = ::memfd_create("test", MFD_CLOEXEC);
  EXPECT_EQ(::write(fd, text.data(), text.size()),
            static_cast<ssize_t>(text.size()));
  return fd;
}

std::string content(const Fd& fd) {
  char buffer[64];
  const auto n = ::pread(fd.get(), buffer, sizeof buffer, 0);
  return {buffer, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

TEST(Liveness, AWorldOfOneNeedsNoStore) {
  const auto liveness = Liveness::start({}, 0, 1, 1s);
  EXPECT_EQ(liveness->host_ranks(), std::vector<int>{0});
  EXPECT_TRUE(liveness->single_host());
  EXPECT_GE(liveness->host_cores(), 1);
  EXPECT_EQ(liveness->rank(), 0);
  EXPECT_EQ(liveness->world_size(), 1);
  EXPECT_FALSE(liveness->disturbed());
  liveness->announce_failure("alone");
  EXPECT_EQ(liveness->failure()->reason, "alone");
}

TEST(Liveness, RanksOfOneHostFindEachOther) {
  Meeting all_looked(4);
  on_ranks(4, [&](int rank, Liveness& liveness) {
    EXPECT_EQ(liveness.rank(), rank);
    EXPECT_EQ(liveness.world_size(), 4);
    EXPECT_EQ(liveness.host_ranks(), (std::vector<int>{0, 1, 2, 3}));
    EXPECT_TRUE(liveness.single_host());
    EXPECT_FALSE(liveness.disturbed());
    EXPECT_EQ(liveness.failure(), std::nullopt);
    EXPECT_EQ(liveness.peer_lost({0, 1, 2, 3}, {}), std::nullopt);
    EXPECT_TRUE(all_looked.wait());
  });
}

TEST(Liveness, CountsTheCoresOfAllRanksOfTheHost) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0 ||
      ::sched_setaffinity(0, sizeof allowed, &allowed) != 0) {
    GTEST_SKIP() << "threads cannot be bound to cores here";
  }
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  const int two = std::min(2, static_cast<int>(cores.size()));
  const auto host_cores = [&](const std::vector<int>& core_of,
                              const std::vector<int>& host_of) {
    const auto store = new_store();
    std::vector<int> counted(3);
    test::on_threads(3, [&](int rank) {
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(cores[core_of[rank] % cores.size()], &own);
      ASSERT_EQ(::sched_setaffinity(0, sizeof own, &own), 0);
      counted[rank] = liveness::start(store, rank, 3, 30s, [&](int other) {
                        return host_of[other] == host_of[rank];
                      })->host_cores();
    });
    return counted;
  };
  using Counts = std::vector<int>;
  EXPECT_EQ(host_cores({0, 0, 0}, {0, 0, 0}), (Counts{1, 1, 1}));
  EXPECT_EQ(host_cores({0, 1, 1}, {0, 0, 0}), (Counts{two, two, two}));
  EXPECT_EQ(host_cores({0, 0, 1}, {0, 0, 1}), (Counts{1, 1, 1}));
}

TEST(Liveness, CoresAreNamedInRanges) {
  using liveness::count_together;
  EXPECT_EQ(count_together({"0-3,8", "2-4", "8"}), 6);
  EXPECT_EQ(count_together({"?", "1500-1501"}), 2);
  EXPECT_EQ(count_together({"?"}), 1);
  EXPECT_EQ(count_together({"0-2000000000"}), 1 << 20);
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    EXPECT_EQ(count_together({liveness::own_cores()}), CPU_COUNT(&allowed));
  }
}

TEST(Liveness, SixtyFourRanks) {
  std::atomic<int> complete{0};
  Meeting all_looked(64);
  on_ranks(64, [&](int, Liveness& liveness) {
    if (liveness.single_host()) ++complete;
    EXPECT_TRUE(all_looked.wait());
  });
  EXPECT_EQ(complete, 64);
}

TEST(Liveness, DescriptorsArriveUnderTheirNames) {
  Meeting done(3);
  on_ranks(3, [&](int rank, Liveness& liveness) {
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      const auto text = std::to_string(rank) + '>' + std::to_string(peer);
      for (const char* name : {"first", "second"}) {
        const Fd fd(memfd_with(name + text));
        liveness.send_fd(peer, name, fd.get());
      }
    }
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      const auto text = std::to_string(peer) + '>' + std::to_string(rank);
      for (const char* name : {"second", "first"}) {
        const Fd fd = liveness.receive_fd(peer, name, 10s);
        EXPECT_EQ(content(fd), name + text);
        EXPECT_EQ(::fcntl(fd.get(), F_GETFD), FD_CLOEXEC);
      }
    }
    EXPECT_TRUE(done.wait());
  });
}

TEST(Liveness, ADescriptorThatDoesNotComeIsATimeout) {
  Meeting done(2);
  on_ranks(2, [&](int rank, Liveness& liveness) {
    if (rank == 0) {
      EXPECT_THROW((void)liveness.receive_fd(1, "none", 20ms), TimeoutError);
      EXPECT_THROW(liveness.send_fd(0, "to myself", 0), InvalidArgument);
    }
    EXPECT_TRUE(done.wait());
  });
}

TEST(Liveness, AGoodbyeIsNoFailure) {
  Meeting looked(3);
  on_ranks(3, [&](int rank, Liveness& liveness) {
    if (rank == 2) {
      liveness.leave();
      liveness.leave();
      EXPECT_TRUE(looked.wait());
      return;
    }
    EXPECT_TRUE(soon([&] { return liveness.has_left(2); }));
    EXPECT_TRUE(liveness.disturbed());
    EXPECT_FALSE(liveness.has_left(1 - rank));
    EXPECT_EQ(liveness.failure(), std::nullopt);
    EXPECT_EQ(liveness.peer_lost({1 - rank}, {}), std::nullopt);
    const auto lost =
        liveness.peer_lost({2}, {.operation = "barrier", .rank = rank});
    ASSERT_TRUE(lost);
    EXPECT_EQ(lost->context().peers, std::vector<int>{2});
    EXPECT_EQ(lost->context().operation, "barrier");
    EXPECT_NE(lost->message().find("rank 2 (pid " + std::to_string(::getpid()) +
                                   ", host "),
              std::string::npos)
        << lost->what();
    EXPECT_NE(lost->message().find("left"), std::string::npos);
    EXPECT_THROW((void)liveness.receive_fd(2, "never", 10s), PeerLost);
    EXPECT_TRUE(looked.wait());
  });
}

TEST(Liveness, AnAnnouncedFailureIsTheCulpritForAll) {
  Meeting looked(3);
  on_ranks(3, [&](int rank, Liveness& liveness) {
    EXPECT_TRUE(looked.wait());  // all have met
    if (rank == 1) liveness.announce_failure("the disk is full");
    EXPECT_TRUE(soon([&] { return liveness.failure().has_value(); }));
    // Whoever leaves because of it is not blamed.
    if (rank == 2) liveness.announce_failure("could not go on");
    EXPECT_TRUE(looked.wait());
    const auto failure = liveness.failure();
    EXPECT_EQ(failure->rank, 1);
    EXPECT_EQ(failure->pid, ::getpid());
    EXPECT_EQ(failure->reason, "the disk is full");
    const auto lost = liveness.peer_lost({0}, {});
    ASSERT_TRUE(lost);
    EXPECT_EQ(lost->context().peers, std::vector<int>{1});
    EXPECT_NE(lost->message().find("failed: the disk is full"),
              std::string::npos);
    EXPECT_TRUE(rank != 0 || soon([&] { return liveness.has_left(2); }));
    EXPECT_TRUE(looked.wait());
  });
}

TEST(Liveness, WhoWasWaitedForInVainIsTheCulpritForAll) {
  Meeting looked(3);
  on_ranks(3, [&](int rank, Liveness& liveness) {
    EXPECT_TRUE(looked.wait());  // all have met
    if (rank == 0) liveness.announce_failure("the barrier is late", 2);
    EXPECT_TRUE(soon([&] { return liveness.failure().has_value(); }));
    EXPECT_EQ(liveness.failure()->rank, 2);
    EXPECT_EQ(liveness.failure()->reason,
              "rank 0 gave up on it: the barrier is late");
    EXPECT_TRUE(rank == 0 || soon([&] { return liveness.has_left(0); }));
    EXPECT_TRUE(looked.wait());
  });
}

TEST(Liveness, AGoodbyeAfterATimeoutNamesWhoWasWaitedFor) {
  Meeting looked(3);
  on_ranks(
      3,
      [&](int rank, Liveness& liveness) {
        EXPECT_TRUE(looked.wait());  // all have met
        if (rank == 0) {
          liveness.announce_timeout({2});
          liveness.leave();
        }
        if (rank == 1) {
          EXPECT_TRUE(soon([&] { return liveness.has_left(0); }));
          EXPECT_EQ(liveness.peer_lost({2}, {}), std::nullopt);
          const auto lost = liveness.peer_lost({0}, {});
          ASSERT_TRUE(lost);
          EXPECT_EQ(lost->context().peers, std::vector<int>{2});
        }
        EXPECT_TRUE(looked.wait());
      },
      [](int rank) { return rank % 2; });
}

TEST(Liveness, TwoFailuresAtOnceHaveOneCulprit) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> culprits[4] = {-1, -1, -1, -1};
    Meeting together(4), looked(4);
    on_ranks(4, [&](int rank, Liveness& liveness) {
      EXPECT_TRUE(together.wait());
      if (rank < 2) liveness.announce_failure("at once");
      if (rank >= 2) {
        EXPECT_TRUE(soon([&] { return liveness.failure().has_value(); }));
        culprits[rank] = liveness.failure()->rank;
      }
      EXPECT_TRUE(looked.wait());
    });
    EXPECT_EQ(culprits[2], culprits[3]);
  }
}

TEST(Liveness, CallbacksRunOnNewsAndAtOnceWhenItIsOld) {
  Meeting subscribed(2), looked(2);
  on_ranks(2, [&](int rank, Liveness& liveness) {
    if (rank == 1) {
      EXPECT_TRUE(subscribed.wait());
      liveness.announce_failure("gone");
      EXPECT_TRUE(looked.wait());
      return;
    }
    std::atomic<int> kept{0}, cancelled{0};
    const auto id = liveness.subscribe([&] { ++kept; });
    liveness.unsubscribe(liveness.subscribe([&] { ++cancelled; }));
    EXPECT_TRUE(subscribed.wait());
    EXPECT_TRUE(soon([&] { return kept > 0; }));
    liveness.unsubscribe(id);
    std::atomic<int> late{0};
    liveness.unsubscribe(liveness.subscribe([&] { ++late; }));
    EXPECT_EQ(late, 1);
    EXPECT_EQ(cancelled, 0);
    EXPECT_TRUE(looked.wait());
  });
}

TEST(Liveness, AMissingRankIsNamed) {
  const auto store = new_store();
  try {
    (void)Liveness::start(store, 0, 3, 50ms);
    FAIL() << "no error";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.context().peers, (std::vector<int>{1, 2}));
    EXPECT_NE(error.message().find("rank 1, 2"), std::string::npos);
  }
}

std::string published(const StorePtr& store, int rank, int field) {
  std::istringstream record(
      store->get_to_str("liveness/" + std::to_string(rank)));
  std::string word;
  for (int i = 0; i <= field; ++i) record >> word;
  return word;
}

void publish(const StorePtr& store,
             int rank,
             const std::string& socket_name,
             const std::string& place = "elsewhere") {
  store->set("liveness/" + std::to_string(rank),
             std::to_string(::getpid()) + ' ' + socket_name +
                 " 00112233445566778899aabbccddeeff " + place + " somewhere 0");
}

Fd connect_to(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    fd.reset();
  }
  return fd;
}

TEST(Liveness, AStrangerWithoutTheSecretIsRefused) {
  const auto store = new_store();
  Meeting intruded(2);
  std::thread first([&] {
    const auto liveness =
        liveness::start(store, 0, 2, 30s, [](int) { return true; });
    EXPECT_EQ(liveness->host_ranks().size(), 2u);
    EXPECT_TRUE(intruded.wait());
  });
  store->wait({"liveness/0"}, 10s);
  const Fd stranger = connect_to(published(store, 0, 1));
  ASSERT_TRUE(stranger);
  struct {
    uint32_t type = 1;
    int32_t rank = 1;
    int64_t time = 0;
    uint64_t length = 32;
    char text[32];
  } hello;
  std::memset(hello.text, 'a', sizeof hello.text);
  ASSERT_EQ(::write(stranger.get(), &hello, sizeof hello),
            static_cast<ssize_t>(sizeof hello));
  const Fd silent = connect_to(published(store, 0, 1));
  ASSERT_TRUE(silent);

  const auto second = Liveness::start(store, 1, 2, 30s);
  EXPECT_EQ(second->host_ranks().size(), 2u);
  EXPECT_TRUE(intruded.wait());
  for (const Fd* fd : {&stranger, &silent}) {
    pollfd end{.fd = fd->get(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&end, 1, 10'000), 1);
    char byte = 0;
    EXPECT_LE(::read(fd->get(), &byte, 1), 0);
  }
  // Nothing listens any more.
  EXPECT_FALSE(connect_to(published(store, 0, 1)));
  first.join();
}

TEST(Liveness, ASocketThatCannotBeReachedIsAnotherHost) {
  const auto store = new_store();
  publish(store, 1, "lockstep-nobody-listens-here");
  try {
    (void)Liveness::start(store, 0, 2, 200ms);
    FAIL() << "no error";
  } catch (const TimeoutError& error) {
    // It is looked for among the other hosts.
    EXPECT_EQ(error.context().peers, std::vector<int>{1});
  }
}

TEST(Liveness, ASocketOfTheSamePlaceThatCannotBeReachedIsADeath) {
  const auto store = new_store();
  publish(store, 1, "lockstep-nobody-listens-here", liveness::own_place());
  try {
    (void)Liveness::start(store, 0, 2, 30s);
    FAIL() << "no error";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.context().peers, std::vector<int>{1});
    EXPECT_NE(error.message().find("died"), std::string::npos);
  }
}

TEST(Liveness, WhoGaveUpWhileTheRanksMetNamesTheCulprit) {
  const auto store = new_store();
  publish(store, 1, "lockstep-nobody-listens-here", liveness::own_place());
  publish(store, 2, "lockstep-nobody-listens-there", liveness::own_place());
  liveness::publish(
      *store, 1, liveness::Verdict{.rank = 2, .time = 1, .reason = "too late"});
  try {
    (void)Liveness::start(store, 0, 3, 30s);
    FAIL() << "no error";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.context().peers, std::vector<int>{2});
    EXPECT_NE(error.message().find("too late"), std::string::npos);
  }
}

TEST(Liveness, ADeathOnTheOwnHostEndsTheWaitForOtherHosts) {
  const auto store = new_store();
  publish(store, 2, "lockstep-nobody-listens-here");
  std::thread second([&] {
    const auto liveness =
        liveness::start(store, 1, 3, 30s, [](int) { return true; });
    EXPECT_EQ(liveness->host_ranks(), (std::vector<int>{0, 1}));
    liveness->announce_failure("the disk is full");
  });
  // Rank 2, of another host, never publishes what it leads.
  EXPECT_THROW((void)Liveness::start(store, 0, 3, 30s), PeerLost);
  second.join();
}

TEST(Liveness, TwoProcessesWithOneRankAreRefused) {
  const auto store = new_store();
  std::thread impostor([&] {
    store->wait({"liveness/0"}, 10s);
    publish(store, 0, "lockstep-another-rank-0");
    publish(store, 1, "lockstep-nobody-listens-here");
  });
  EXPECT_THROW((void)Liveness::start(store, 0, 2, 10s), StoreError);
  impostor.join();
}

TEST(Liveness, NewsTravelBetweenHosts) {
  // Eleven hosts of two ranks: a tree of more than one level.
  const auto host_of = [](int rank) { return rank / 2; };
  Meeting together(22), looked(22);
  on_ranks(
      22,
      [&](int rank, Liveness& liveness) {
        const int first = rank / 2 * 2;
        EXPECT_EQ(liveness.host_ranks(), (std::vector<int>{first, first + 1}));
        EXPECT_FALSE(liveness.single_host());
        EXPECT_TRUE(together.wait());
        if (rank == 21) liveness.announce_failure("far away");
        if (rank == 3) {
          EXPECT_TRUE(soon([&] { return liveness.failure().has_value(); }));
          liveness.announce_failure("a consequence");
        }
        EXPECT_TRUE(soon([&] { return liveness.failure().has_value(); }));
        EXPECT_EQ(liveness.failure()->rank, 21);
        EXPECT_EQ(liveness.failure()->reason, "far away");
        if (rank != 3) {
          EXPECT_TRUE(soon([&] { return liveness.has_left(3); }));
        }
        EXPECT_THROW(liveness.send_fd((rank + 2) % 22, "x", 0),
                     InvalidArgument);
        EXPECT_TRUE(looked.wait());
      },
      host_of);
}

TEST(Liveness, GoodbyesReachOtherHosts) {
  on_ranks(
      22,
      [](int rank, Liveness& liveness) {
        // All others, those that pass the news on too, end at once.
        if (rank != 0) return;
        for (int other = 1; other < 22; ++other) {
          EXPECT_TRUE(soon([&] { return liveness.has_left(other); })) << other;
        }
        EXPECT_EQ(liveness.failure(), std::nullopt);
      },
      [](int rank) { return rank / 2; });
}

TEST(Liveness, RanksTellHowFarTheyHaveCome) {
  for (const int per_host : {4, 2, 1}) {
    Meeting all_have_come(4);
    Meeting all_asked(4);
    on_ranks(
        4,
        [&](int rank, Liveness& liveness) {
          liveness.set_progress(10 + rank);
          EXPECT_TRUE(all_have_come.wait());
          const auto progress = liveness.ask_progress(10s);
          for (uint64_t other = 0; other < 4; ++other) {
            EXPECT_EQ(progress.at(other), 10 + other);
          }
          EXPECT_FALSE(liveness.disturbed());
          EXPECT_TRUE(all_asked.wait());
        },
        [&](int rank) { return rank / per_host; });
  }
}

TEST(Liveness, WhomARankGaveUpOnIsKnownToAll) {
  Meeting all_there(4);
  Meeting all_looked(4);
  on_ranks(
      4,
      [&](int rank, Liveness& liveness) {
        EXPECT_FALSE(liveness.timed_out({}).has_value());
        EXPECT_TRUE(all_there.wait());
        if (rank == 0) liveness.announce_timeout({1, 3});
        EXPECT_TRUE(soon([&] { return liveness.disturbed(); }));
        const auto error = liveness.timed_out({.rank = rank});
        ASSERT_TRUE(error);
        EXPECT_EQ(error->context().peers, (std::vector<int>{1, 3}));
        EXPECT_EQ(error->context().rank, rank);
        EXPECT_EQ(liveness.failure(), std::nullopt);
        EXPECT_TRUE(all_looked.wait());
      },
      [](int rank) { return rank / 2; });
}

TEST(Liveness, NothingListensOnceTheRanksHaveMet) {
  const auto listeners = [] {
    int count = 0;
    std::string line;
    for (std::ifstream file("/proc/self/net/unix"); std::getline(file, line);) {
      // Flag 0x10000: accepts connections.
      count += line.find("00010000") != std::string::npos &&
               line.find("@lockstep-") != std::string::npos;
    }
    return count;
  };
  Meeting together(4), looked(4);
  const int before = listeners();
  on_ranks(
      4,
      [&](int, Liveness&) {
        EXPECT_TRUE(together.wait());
        EXPECT_LE(listeners(), before);
        EXPECT_TRUE(looked.wait());
      },
      [](int rank) { return rank % 2; });
}

}  // namespace
}  // namespace lockstep::comm
