// Sends and receives, the same on every backend: see conformance.h.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/distributed/point_to_point.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/testing/run_ranks.h"
#include "unit/conformance.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
constexpr c10::ScalarType kDtypes[] = {at::kByte,
                                       at::kChar,
                                       at::kShort,
                                       at::kInt,
                                       at::kLong,
                                       at::kHalf,
                                       at::kBFloat16,
                                       at::kFloat,
                                       at::kDouble,
                                       at::kBool,
                                       at::kComplexFloat,
                                       at::kComplexDouble,
                                       at::kFloat8_e4m3fn};

/// Element i of message `number` from `rank`.
Tensor values(int rank,
              int64_t numel,
              c10::ScalarType dtype = at::kFloat,
              int64_t number = 0) {
  return ((at::arange(numel, at::kLong) * 7 + rank * 3 + number * 5) % 9)
      .to(dtype);
}

Tensor blank(int64_t numel, c10::ScalarType dtype = at::kFloat) {
  return at::zeros({numel}, at::kByte).to(dtype);
}

class PointToPoint : public Conformance {};

INSTANTIATE_TEST_SUITE_P(Backends,
                         PointToPoint,
                         ::testing::ValuesIn(cases({2, 3, 4})),
                         name_of);

TEST_P(PointToPoint, EveryDtypeAndSize) {
  const int n = ranks();
  run([&](int rank) {
    const int next = (rank + 1) % n;
    const int last = (rank + n - 1) % n;
    for (const auto dtype : kDtypes) {
      for (const int64_t numel : {0, 1, 7, 1025, 50'001}) {
        const std::string what = std::string(c10::toString(dtype)) + ", " +
                                 std::to_string(numel) + " elements";
        const int tag = static_cast<int>(numel % 3);
        // Around the ring, one after the other: rank 0 sends first.
        const auto own = values(rank, numel, dtype);
        auto tensor = blank(numel, dtype);
        if (rank == 0) send(own, {.dst = next, .tag = tag});
        EXPECT_EQ(recv(tensor, {.src = last, .tag = tag}), last);
        if (rank != 0) send(own, {.dst = next, .tag = tag});
        EXPECT_TRUE(same(tensor, values(last, numel, dtype))) << what;
        // All at the same time.
        tensor = blank(numel, dtype);
        const auto sent = isend(own, {.dst = next, .tag = tag});
        const auto received = irecv(tensor, {.src = last, .tag = tag});
        received.wait();
        sent.wait();
        EXPECT_EQ(received.source_rank(), last);
        EXPECT_TRUE(received.is_completed() && sent.is_completed());
        EXPECT_TRUE(same(tensor, values(last, numel, dtype))) << what;
      }
    }
  });
}

TEST_P(PointToPoint, EveryLayoutLeavesTheRestOfTheStorage) {
  const int n = ranks();
  run([&](int rank) {
    const int next = (rank + 1) % n;
    const int last = (rank + n - 1) % n;
    using View = std::function<Tensor(const Tensor&)>;
    const std::vector<std::pair<const char*, View>> views = {
        {"transposed", [](const Tensor& t) { return t.t(); }},
        {"strided", [](const Tensor& t) { return t.slice(1, 0, 200, 3); }},
        {"offset", [](const Tensor& t) { return t.narrow(0, 5, 60); }},
    };
    for (const auto& [what, view] : views) {
      const auto base = values(rank, 100 * 200).view({100, 200});
      auto storage = at::full({100, 200}, -1.F);
      auto to = view(storage);
      const auto sent = isend(view(base), {.dst = next});
      irecv(to, {.src = last}).wait();
      sent.wait();
      auto expected = at::full({100, 200}, -1.F);
      view(expected).copy_(view(values(last, 100 * 200).view({100, 200})));
      EXPECT_TRUE(storage.equal(expected)) << what;
    }
    // Views that promise other values than lie in memory.
    const auto complex = at::complex(at::arange(8, at::kDouble),
                                     at::arange(8, at::kDouble) + rank);
    auto to = at::zeros({8}, at::kComplexDouble).conj();
    const auto sent = isend(complex.conj(), {.dst = next});
    recv(to, {.src = last});
    sent.wait();
    EXPECT_TRUE(at::equal(to.resolve_conj(),
                          at::complex(at::arange(8, at::kDouble),
                                      -at::arange(8, at::kDouble) - last)));
  });
}

TEST_P(PointToPoint, BothSendFirst8MegabytesAHundredTimes) {
  run([&](int rank) {
    if (rank > 1) return;
    constexpr int64_t kNumel = 2 << 20;
    const auto own = values(rank, kNumel);
    const auto expected = values(1 - rank, kNumel);
    auto to = blank(kNumel);
    for (int i = 0; i < 100; ++i) {
      to[i] = -1;
      const auto sent = isend(own, {.dst = 1 - rank});
      const auto received = irecv(to, {.src = 1 - rank});
      received.wait();
      sent.wait();
      ASSERT_TRUE(to.equal(expected)) << i;
    }
  });
}

TEST_P(PointToPoint, ReceivesInTheOppositeOrderOfTags) {
  for (const int64_t numel : {10, 500'000}) {
    run([&](int rank) {
      if (rank > 1) return;
      const int peer = 1 - rank;
      std::vector<Work> works;
      for (int tag = 0; tag < 4; ++tag) {
        works.push_back(isend(values(rank, numel, at::kFloat, tag),
                              {.dst = peer, .tag = tag}));
      }
      for (int tag = 3; tag >= 0; --tag) {
        auto to = blank(numel);
        recv(to, {.src = peer, .tag = tag});
        EXPECT_TRUE(to.equal(values(peer, numel, at::kFloat, tag))) << tag;
      }
      for (const auto& work : works) work.wait();
    });
  }
}

TEST_P(PointToPoint, MessagesOfOneTagArriveInOrder) {
  run([&](int rank) {
    constexpr int kMessages = 200;
    const auto numel = [](int i) { return i % 7 == 0 ? 30'000 : i % 13 + 1; };
    std::vector<Work> works;
    std::vector<Tensor> to;
    for (int i = 0; i < kMessages; ++i) {
      if (rank == 1) {
        works.push_back(
            isend(values(1, numel(i), at::kFloat, i), {.dst = 0, .tag = 9}));
      } else if (rank == 0) {
        to.push_back(blank(numel(i)));
        works.push_back(irecv(to.back(), {.src = 1, .tag = 9}));
      }
    }
    // The last one first: all go on without their handles.
    while (!works.empty()) {
      works.back().wait();
      works.pop_back();
    }
    for (size_t i = 0; i < to.size(); ++i) {
      EXPECT_TRUE(to[i].equal(
          values(1, to[i].numel(), at::kFloat, static_cast<int64_t>(i))))
          << i;
    }
  });
}

TEST_P(PointToPoint, NothingWaitsForALongReceive) {
  run([&](int rank) {
    auto late = blank(1000);
    std::optional<RecvWork> waiting;
    if (rank == 0) waiting = irecv(late, {.src = 1, .tag = 1});
    // Collectives, synchronous and not.
    for (int i = 0; i < 20; ++i) {
      auto sum = at::ones({70'000});
      all_reduce(sum, {.async_op = i % 2 == 1}).wait();
      EXPECT_EQ(sum[5].item<int>(), ranks());
    }
    // Messages between the same two and with other tags.
    for (int i = 0; i < 20 && rank < 2; ++i) {
      auto to = blank(40'000);
      const auto sent = isend(values(rank, 40'000), {.dst = 1 - rank});
      recv(to, {.src = 1 - rank});
      sent.wait();
      EXPECT_TRUE(to.equal(values(1 - rank, 40'000)));
    }
    if (rank == 0) {
      EXPECT_FALSE(waiting->is_completed());
    }
    barrier();
    if (rank == 1) send(values(1, 1000), {.dst = 0, .tag = 1});
    if (rank == 0) {
      waiting->wait();
      EXPECT_TRUE(late.equal(values(1, 1000)));
    }
  });
}

TEST_P(PointToPoint, GoesOnWithoutTheCaller) {
  run([&](int rank) {
    constexpr int64_t kNumel = 3'000'000;
    auto to = blank(kNumel);
    std::vector<Work> works;
    if (rank == 0) works.push_back(isend(values(0, kNumel), {.dst = 1}));
    if (rank == 1) works.push_back(irecv(to, {.src = 0}));
    const Deadline deadline(30s);
    for (const auto& work : works) {
      while (!work.is_completed() && !deadline.passed()) {
        std::this_thread::sleep_for(1ms);
      }
      EXPECT_TRUE(work.is_completed());
      work.wait();
    }
    if (rank == 1) {
      EXPECT_TRUE(to.equal(values(0, kNumel)));
    }
  });
}

TEST_P(PointToPoint, FromAnyRank) {
  const int n = ranks();
  run([&](int rank) {
    for (const int64_t numel : {3, 100'000}) {
      const int tag = static_cast<int>(numel);
      if (rank != 0) {
        send(values(rank, numel), {.dst = 0, .tag = tag});
        continue;
      }
      std::set<int> sources;
      for (int i = 1; i < n; ++i) {
        auto to = blank(numel);
        if (i % 2 == 0) {
          sources.insert(recv(to, {.tag = tag}));
        } else {
          const auto work = irecv(to, {.tag = tag});
          work.wait();
          sources.insert(work.source_rank());
        }
        EXPECT_TRUE(
            std::any_of(sources.begin(), sources.end(), [&](int source) {
              return to.equal(values(source, numel));
            }));
      }
      EXPECT_EQ(static_cast<int>(sources.size()), n - 1);
    }
  });
}

TEST_P(PointToPoint, ToTheOwnRank) {
  run([&](int rank) {
    for (const int64_t numel : {0, 5, 100'000}) {
      auto to = blank(numel);
      const auto received = irecv(to, {.src = rank, .tag = 2});
      isend(values(rank, numel), {.dst = rank, .tag = 2}).wait();
      received.wait();
      EXPECT_EQ(received.source_rank(), rank);
      EXPECT_TRUE(to.equal(values(rank, numel)));
    }
    try {
      send(at::ones({2}), {.dst = rank});
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("use isend and irecv"),
                std::string::npos)
          << e.what();
    }
  });
}

TEST_P(PointToPoint, Batches) {
  const int n = ranks();
  run([&](int rank) {
    for (const int64_t numel : {1, 200'000}) {
      std::vector<P2POp> ops;
      std::vector<Tensor> to;
      for (int peer = 0; peer < n; ++peer) {
        to.push_back(blank(numel));
        ops.emplace_back(irecv, to.back(), peer);
      }
      for (int peer = n - 1; peer >= 0; --peer) {
        ops.emplace_back(isend, values(rank, numel, at::kFloat, peer), peer);
      }
      for (const auto& work : batch_isend_irecv(ops)) work.wait();
      for (int peer = 0; peer < n; ++peer) {
        EXPECT_TRUE(to[peer].equal(values(peer, numel, at::kFloat, rank)));
      }
    }
  });
}

TEST_P(PointToPoint, InAGroupOfSomeRanks) {
  if (ranks() < 3) return;  // the group has members 1 and 2
  run([&](int rank) {
    const auto group = new_group({1, 2});
    auto to = blank(8);
    if (rank == 0) {
      // No member: nothing happens.
      send(to, {.dst = 1, .group = group});
      isend(to, {.dst = 1, .group = group}).wait();
      EXPECT_EQ(recv(to, {.group = group}), -1);
      EXPECT_EQ(irecv(to, {.group = group}).source_rank(), -1);
      EXPECT_TRUE(
          batch_isend_irecv({P2POp(isend, to, 1, {.group = group})}).empty());
    } else if (rank == 1) {
      // By the rank in the default group, and by that in the group.
      send(values(1, 8), {.dst = 2, .tag = 1, .group = group});
      isend(values(1, 8), {.tag = 2, .group = group, .group_dst = 1}).wait();
      EXPECT_EQ(recv(to, {.group = group}), 2);
      EXPECT_TRUE(to.equal(values(2, 8)));
      const auto text = [&] {
        try {
          recv(to, {.group = group, .timeout = 50ms, .group_src = 1});
        } catch (const TimeoutError& e) {
          EXPECT_EQ(e.context().peers, std::vector<int>{2});
          return std::string(e.what());
        }
        return std::string();
      }();
      EXPECT_NE(text.find("rank 2 did not send"), std::string::npos) << text;
    } else if (rank == 2) {
      EXPECT_EQ(recv(to, {.src = 1, .tag = 1, .group = group}), 1);
      auto work = irecv(to, {.tag = 2, .group = group, .group_src = 0});
      work.wait();
      EXPECT_EQ(work.source_rank(), 1);
      EXPECT_TRUE(to.equal(values(1, 8)));
      send(values(2, 8), {.dst = 1, .group = group});
      std::this_thread::sleep_for(500ms);
    }
  });
}

TEST_P(PointToPoint, WrongArgumentsChangeNothing) {
  run([&](int rank) {
    const auto refused = [](const std::function<void()>& call,
                            const std::string& part) {
      try {
        call();
        ADD_FAILURE() << "no error: " << part;
      } catch (const InvalidArgument& e) {
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos)
            << e.what();
      }
    };
    auto tensor = at::ones({4});
    const int n = ranks();
    const int peer = (rank + 1) % n;
    refused([&] { send(tensor, {}); }, "dst or group_dst must be given");
    refused([&] { isend(tensor, {.dst = n}); },
            "dst is " + std::to_string(n) + "; the ranks are 0 to");
    refused([&] { irecv(tensor, {.src = -1}); }, "src is -1");
    refused([&] { isend(tensor, {.dst = 0, .group_dst = 0}); },
            "both dst and group_dst");
    refused([&] { isend(tensor, {.dst = peer, .tag = -3}); }, "tag is -3");
    refused([&] { recv(tensor, {.tag = -3}); }, "tag is -3");
    refused([&] { isend(tensor, {.dst = peer, .timeout = 0ms}); }, "timeout");
    refused([&] { isend(Tensor(), {.dst = peer}); }, "undefined");
    Tensor expanded = at::ones({1}).expand({4});
    refused([&] { irecv(expanded, {.src = peer}); }, "share memory");
    refused([&] { batch_isend_irecv({}); }, "empty");
    refused([&] { batch_isend_irecv({P2POp(irecv, tensor, {})}); },
            "peer or group_peer");
    // The whole batch is checked before anything starts.
    refused(
        [&] {
          batch_isend_irecv(
              {P2POp(isend, tensor, peer), P2POp(irecv, tensor, n)});
        },
        "src is " + std::to_string(n));
    const auto sent = isend(values(rank, 6), {.dst = peer});
    auto to = blank(6);
    EXPECT_EQ(recv(to), (rank + n - 1) % n);
    sent.wait();
  });
}

TEST(PointToPointWithoutGroup, EveryCallSaysWhatToDo) {
  auto tensor = at::ones({2});
  const auto refused = [](const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("call init_process_group first"),
                std::string::npos)
          << e.what();
    }
  };
  refused([&] { send(tensor, {.dst = 0}); });
  refused([&] { recv(tensor); });
  refused([&] { isend(tensor, {.dst = 0}); });
  refused([&] { irecv(tensor); });
  refused([&] { batch_isend_irecv({P2POp(isend, tensor, 0)}); });
}

TEST(PointToPointAlone, AWorldOfOneCanSendToItself) {
  testing::run_ranks(1, [](int) {
    auto to = blank(9);
    const auto sent = isend(values(0, 9), {.dst = 0, .tag = 1});
    EXPECT_FALSE(sent.is_completed());
    EXPECT_EQ(recv(to, {.tag = 1}), 0);
    sent.wait();
    EXPECT_TRUE(to.equal(values(0, 9)));
    EXPECT_THROW(send(to, {.dst = 0}), InvalidArgument);
    EXPECT_THROW(recv(to, {.timeout = 30ms}), TimeoutError);
  });
}

/// What goes wrong between ranks.
class PointToPointErrors : public PointToPoint {
 protected:
  template <class E>
  static std::string text_of(const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const E& e) {
      return e.what();
    } catch (const std::exception& e) {
      ADD_FAILURE() << "another error: " << e.what();
    }
    return "";
  }
};

INSTANTIATE_TEST_SUITE_P(Backends,
                         PointToPointErrors,
                         ::testing::ValuesIn(cases({2, 3})),
                         name_of);

TEST_P(PointToPointErrors, AMismatchIsNamedOnBothSides) {
  struct Case {
    Tensor sent;
    Tensor expected;
    const char* text;
  };
  for (const auto& [sent, expected, text] :
       {Case{values(0, 5),
             values(0, 4),
             "rank 0 sends 5 elements of Float with tag 3 to rank 1, which "
             "expects 4 elements of Float"},
        Case{values(0, 400'000),
             values(0, 400'001),
             "rank 0 sends 400000 elements of Float with tag 3 to rank 1, "
             "which expects 400001 elements of Float"},
        Case{values(0, 4, at::kInt),
             values(0, 4),
             "rank 0 sends 4 elements of Int with tag 3 to rank 1, which "
             "expects 4 elements of Float"}}) {
    run([&, sent = sent, expected = expected, text = text](int rank) {
      if (rank > 1) return;
      auto to = expected.clone();
      const auto error = text_of<MismatchError>([&] {
        if (rank == 0) {
          send(sent, {.dst = 1, .tag = 3});
        } else {
          recv(to, {.src = 0, .tag = 3});
        }
      });
      EXPECT_NE(error.find(text), std::string::npos) << error;
      EXPECT_TRUE(to.equal(expected));
      // The group cannot be used any more.
      text_of<BackendError>([&] { send(to, {.dst = 1 - rank}); });
      text_of<BackendError>([&] { barrier(); });
    });
  }
}

TEST_P(PointToPointErrors, ASilentPeerIsNamedAtTheDeadline) {
  for (const bool sends : {true, false}) {
    for (const bool async : {true, false}) {
      run(
          [&](int rank) {
            if (rank == 1) {
              std::this_thread::sleep_for(2s);
              return;
            }
            const auto start = Clock::now();
            auto tensor = values(0, 200'000);
            const auto error = text_of<TimeoutError>([&] {
              const auto limit = 500ms;
              if (sends && async) {
                isend(tensor, {.dst = 1, .timeout = limit}).wait();
              } else if (sends) {
                send(tensor, {.dst = 1, .timeout = limit});
              } else if (async) {
                irecv(tensor, {.src = 1, .timeout = limit}).wait();
              } else {
                recv(tensor, {.src = 1, .timeout = limit});
              }
            });
            EXPECT_LT(Clock::now() - start, 1500ms);
            EXPECT_GE(Clock::now() - start, 500ms);
            EXPECT_NE(error.find("rank 1 did not"), std::string::npos) << error;
            EXPECT_NE(error.find("within 500 ms"), std::string::npos) << error;
          },
          20s);
    }
  }
}

TEST_P(PointToPointErrors, AnyRankMeansAllOfThem) {
  run(
      [&](int rank) {
        if (rank != 0) {
          std::this_thread::sleep_for(rank == 1 ? 300ms : 1500ms);
          return;
        }
        auto to = blank(3);
        const auto start = Clock::now();
        if (ranks() == 2) {
          // The only one that could send has left.
          const auto error = text_of<PeerLost>([&] { recv(to); });
          EXPECT_NE(error.find("rank 1"), std::string::npos) << error;
          EXPECT_LT(Clock::now() - start, 5s);
        } else {
          // Rank 2 still could.
          const auto error =
              text_of<TimeoutError>([&] { recv(to, {.timeout = 900ms}); });
          EXPECT_NE(error.find("no rank sent"), std::string::npos) << error;
        }
      },
      20s);
}

TEST_P(PointToPointErrors, APeerThatFailsIsNamedAtOnce) {
  for (const bool sends : {true, false}) {
    std::atomic<int> lost{0};
    EXPECT_THROW(run([&](int rank) {
                   barrier();  // all have joined
                   if (rank == 1) throw std::runtime_error("no more coffee");
                   auto tensor = values(0, 200'000);
                   try {
                     if (sends) {
                       send(tensor, {.dst = 1});
                     } else {
                       recv(tensor, {.src = 1});
                     }
                     ADD_FAILURE() << "no error";
                   } catch (const PeerLost& e) {
                     EXPECT_EQ(e.context().peers, std::vector<int>{1})
                         << e.what();
                     EXPECT_NE(std::string(e.what()).find("no more coffee"),
                               std::string::npos)
                         << e.what();
                     ++lost;
                   }
                 }),
                 std::runtime_error);
    EXPECT_EQ(lost, ranks() - 1);
  }
}

TEST_P(PointToPointErrors, ASendIsDeliveredBeforeItsRankLeaves) {
  for (const int64_t numel : {4, 2'000'000}) {
    run([&](int rank) {
      if (rank == 0) {
        isend(values(0, numel), {.dst = 1});
        return;
      }
      if (rank != 1) return;
      std::this_thread::sleep_for(200ms);
      auto to = blank(numel);
      recv(to, {.src = 0});
      EXPECT_TRUE(to.equal(values(0, numel)));
    });
  }
}

TEST_P(PointToPointErrors, AReceiveEndsWithItsGroup) {
  run([&](int rank) {
    barrier();
    if (rank != 0) return;
    auto to = blank(4);
    const auto work = irecv(to, {.src = 1, .tag = 6});
    destroy_process_group();
    EXPECT_TRUE(work.is_completed());
    // Or, where rank 1 was the first to leave, a PeerLost.
    text_of<Error>([&] { work.wait(); });
  });
}

}  // namespace
}  // namespace lockstep
