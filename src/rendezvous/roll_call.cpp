#include "rendezvous/roll_call.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <sstream>
#include <thread>

#include "core/clock.h"
#include "core/host.h"
#include "lockstep/core/error.h"
#include "lockstep/version.h"
#include "torch_compat/version.h"

namespace lockstep::rendezvous {
namespace {

using Bytes = std::vector<uint8_t>;

// Values under the keys below. Rank 0 reads all entries and gives the verdict
// that the others wait for. Who finds its rank taken puts a verdict in place
// of everything that is still missing, so that nobody waits on.
//   rank/R    "versions\nwho\nunique", or a verdict
//   verdict   "ok", "mismatch:TEXT", "twice:TEXT", "timeout:RANKS", where
//             RANKS are those that did not come, with a space before each
const std::string kVerdictKey = "lockstep/verdict";
const std::string kOk = "ok";
const std::string kMismatch = "mismatch:";
const std::string kTwice = "twice:";
const std::string kTimeout = "timeout:";
/// How many of the others have read a verdict that is not "ok".
const std::string kReadersKey = "lockstep/readers";
/// How long rank 0 stays for them: its end may take the store with it.
constexpr std::chrono::milliseconds kReadersPatience(1000);

std::string rank_key(int rank) {
  return "lockstep/rank/" + std::to_string(rank);
}

Bytes bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string text(const Bytes& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::string line(const std::string& value, int number) {
  size_t start = 0;
  for (; number > 0; --number) start = value.find('\n', start) + 1;
  return value.substr(start, value.find('\n', start) - start);
}

bool begins_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

std::string who_am_i() {
  return "pid " + std::to_string(::getpid()) + " on host " + host_name();
}

class RollCall {
 public:
  RollCall(c10d::Store& store,
           int rank,
           int world_size,
           std::chrono::milliseconds timeout)
      : store_(store),
        rank_(rank),
        world_size_(world_size),
        deadline_(timeout) {}

  void run(const std::string& versions) {
    static std::atomic<int> calls{0};
    const std::string own = versions + '\n' + who_am_i() + '\n' +
                            std::to_string(calls.fetch_add(1));
    const std::string found = put(rank_key(rank_), own);
    if (found != own) refuse_second(found);
    follow(rank_ == 0 ? give_verdict() : await_verdict());
  }

 private:
  /// Stores the value if there is none; returns what is stored.
  std::string put(const std::string& key, const std::string& value) {
    return text(store_.compareSet(key, {}, bytes(value)));
  }

  [[noreturn]] void refuse_second(const std::string& first) {
    std::string verdict = first;
    if (!begins_with(verdict, kTwice)) {
      verdict = kTwice + "rank " + std::to_string(rank_) +
                " is there twice: " + line(first, 1) + " and " + who_am_i() +
                "; give every process a RANK of its own, and every job a "
                "store of its own";
    }
    put(kVerdictKey, verdict);
    for (int r = 0; r < world_size_; ++r) put(rank_key(r), verdict);
    fail<InvalidArgument>(verdict.substr(kTwice.size()), {rank_});
  }

  std::string give_verdict() {
    const std::string verdict = put(kVerdictKey, own_verdict());
    if (verdict != kOk) await_readers();
    return verdict;
  }

  std::string own_verdict() {
    std::vector<std::string> keys;
    for (int r = 0; r < world_size_; ++r) keys.push_back(rank_key(r));
    if (!wait(keys)) return kTimeout + listed(missing());
    std::string verdict = kOk;
    std::string first;
    for (int r = 0; r < world_size_ && verdict == kOk; ++r) {
      const std::string entry = text(store_.get(keys[r]));
      if (r == 0) first = entry;
      if (begins_with(entry, kTwice)) {
        verdict = entry;
      } else if (line(entry, 0) != line(first, 0)) {
        verdict = kMismatch + "rank 0 (" + line(first, 1) + ") runs " +
                  line(first, 0) + ", rank " + std::to_string(r) + " (" +
                  line(entry, 1) + ") runs " + line(entry, 0) +
                  "; give all ranks the same versions";
      }
    }
    return verdict;
  }

  std::string await_verdict() {
    std::string verdict;
    if (wait({kVerdictKey})) {
      verdict = text(store_.get(kVerdictKey));
    } else {
      auto absent = missing();
      if (absent.empty()) absent = {0};
      // For all: who comes later belongs to the next attempt.
      verdict = put(kVerdictKey, kTimeout + listed(absent));
    }
    if (verdict != kOk) store_.add(kReadersKey, 1);
    return verdict;
  }

  /// Waits until those who are there have read the verdict.
  void await_readers() {
    int64_t readers = 0;
    for (int r = 1; r < world_size_; ++r) {
      readers += store_.check({rank_key(r)}) &&
                 !begins_with(text(store_.get(rank_key(r))), kTwice);
    }
    const Deadline patience(kReadersPatience);
    while (store_.add(kReadersKey, 0) < readers && !patience.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void follow(const std::string& verdict) {
    if (verdict == kOk) return;
    if (begins_with(verdict, kMismatch)) {
      fail<MismatchError>(verdict.substr(kMismatch.size()), {});
    }
    if (begins_with(verdict, kTwice)) {
      fail<InvalidArgument>(verdict.substr(kTwice.size()), {});
    }
    const std::string ranks = verdict.substr(kTimeout.size());
    std::vector<int> absent;
    std::istringstream stream(ranks);
    for (int rank = 0; stream >> rank;) absent.push_back(rank);
    fail<TimeoutError>((absent.size() == 1 ? "rank" : "ranks") + ranks +
                           " did not arrive in time; start all ranks with the "
                           "same WORLD_SIZE and master address, or raise the "
                           "timeout",
                       absent);
  }

  /// False at the deadline.
  bool wait(const std::vector<std::string>& keys) {
    try {
      // The store takes zero for "no limit".
      store_.wait(
          keys, std::max(deadline_.remaining(), std::chrono::milliseconds(1)));
      return true;
    } catch (const c10::DistStoreError&) {
      return false;
    }
  }

  std::vector<int> missing() {
    std::vector<int> ranks;
    for (int r = 0; r < world_size_; ++r) {
      if (!store_.check({rank_key(r)})) ranks.push_back(r);
    }
    return ranks;
  }

  static std::string listed(const std::vector<int>& ranks) {
    std::string text;
    for (const int r : ranks) text += ' ' + std::to_string(r);
    return text;
  }

  template <class E>
  [[noreturn]] void fail(const std::string& message, std::vector<int> peers) {
    ErrorContext context = {.operation = "init_process_group",
                            .group = "world",
                            .rank = rank_,
                            .world_size = world_size_,
                            .peers = std::move(peers)};
    if constexpr (std::is_same_v<E, TimeoutError>) {
      context.elapsed = deadline_.elapsed();
    }
    throw E(message, std::move(context));
  }

  c10d::Store& store_;
  int rank_;
  int world_size_;
  Deadline deadline_;
};

}  // namespace

std::string own_versions() {
  return "libtorch " + torch_compat::torch_version() + " and Lockstep " +
         LOCKSTEP_VERSION;
}

void roll_call(c10d::Store& store,
               int rank,
               int world_size,
               std::chrono::milliseconds timeout,
               const std::string& versions) {
  try {
    RollCall(store, rank, world_size, timeout).run(versions);
  } catch (const c10::Error& e) {
    throw StoreError(std::string("the store was lost, which rank 0 or its "
                                 "launcher serves: ") +
                         e.what_without_backtrace(),
                     {.operation = "init_process_group",
                      .group = "world",
                      .rank = rank,
                      .world_size = world_size,
                      .peers = {0}});
  }
}

bool roll_call_is_over(c10d::Store& store, int rank) {
  if (store.check({kVerdictKey}) &&
      begins_with(text(store.get(kVerdictKey)), kTimeout)) {
    return true;
  }
  return store.check({rank_key(rank)}) &&
         line(text(store.get(rank_key(rank))), 1) == who_am_i();
}

void publish_versions(c10d::Store& store, int rank) {
  store.set(rank_key(rank), bytes(own_versions()));
}

}  // namespace lockstep::rendezvous
