#include "comm/liveness/records.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "lockstep/core/error.h"

namespace lockstep::comm::liveness {
namespace {

constexpr const char* kOperation = "init_process_group";
constexpr std::chrono::milliseconds kSlice(50);

std::string rank_key(int rank) {
  return "liveness/" + std::to_string(rank);
}

std::string leader_key(int rank) {
  return "liveness/leader/" + std::to_string(rank);
}

std::string last_word_key(int rank) {
  return "liveness/last_word/" + std::to_string(rank);
}

/// Runs what uses the store; its errors as ours.
template <class F>
auto with_store(F use) {
  try {
    return use();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw StoreError(std::string("the store was lost: ") + error.what(),
                     {.operation = kOperation});
  }
}

void set(c10d::Store& store, const std::string& key, const std::string& text) {
  with_store(
      [&] { store.set(key, std::vector<uint8_t>(text.begin(), text.end())); });
}

bool arrive_within(c10d::Store& store,
                   const std::vector<std::string>& keys,
                   std::chrono::milliseconds limit) {
  try {
    // Zero would mean to wait for ever.
    store.wait(keys, std::max(limit, std::chrono::milliseconds(1)));
    return true;
  } catch (const c10::DistStoreError&) {
    return false;
  }
}

void check_all_there(c10d::Store& store,
                     const std::vector<std::string>& keys,
                     const std::vector<int>& ranks,
                     const Deadline& deadline) {
  ErrorContext context{.operation = kOperation, .elapsed = deadline.elapsed()};
  std::string names;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (store.check({keys[i]})) continue;
    context.peers.push_back(ranks[i]);
    names += (names.empty() ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (names.empty()) return;
  throw TimeoutError("rank " + names +
                         " did not arrive; look at its own output, and "
                         "whether it was started at all",
                     context);
}

/// Waits for the keys of `ranks` and calls `look` now and then.
std::vector<std::string> get(c10d::Store& store,
                             const std::vector<int>& ranks,
                             std::string (*key_of)(int),
                             const Deadline& deadline,
                             const std::function<void()>& look) {
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (const int rank : ranks) keys.push_back(key_of(rank));
  return with_store([&] {
    while (
        !arrive_within(store, keys, std::min(deadline.remaining(), kSlice))) {
      look();
      if (deadline.passed()) check_all_there(store, keys, ranks, deadline);
    }
    std::vector<std::string> texts;
    texts.reserve(keys.size());
    if (store.hasExtendedApi()) {
      for (const auto& value : store.multiGet(keys)) {
        texts.emplace_back(value.begin(), value.end());
      }
    } else {
      for (const auto& key : keys) texts.push_back(store.get_to_str(key));
    }
    return texts;
  });
}

}  // namespace

void publish(c10d::Store& store, int rank, const RankRecord& record) {
  std::ostringstream text;
  text << record.pid << ' ' << record.socket_name << ' ' << record.secret << ' '
       << record.place << ' ' << record.host << ' ' << record.cores;
  set(store, rank_key(rank), text.str());
}

void publish(c10d::Store& store, int rank, const LeaderRecord& record) {
  std::ostringstream text;
  text << record.address.ip << ' ' << record.address.port;
  for (const int host_rank : record.ranks) text << ' ' << host_rank;
  set(store, leader_key(rank), text.str());
}

void publish(c10d::Store& store, int rank, const Verdict& last_word) {
  std::ostringstream text;
  text << last_word.rank << ' ' << last_word.time << ' ' << last_word.reason;
  set(store, last_word_key(rank), text.str());
}

std::vector<RankRecord> rank_records(c10d::Store& store,
                                     int world_size,
                                     const Deadline& deadline) {
  std::vector<int> all(world_size);
  for (int rank = 0; rank < world_size; ++rank) all[rank] = rank;
  std::vector<RankRecord> records;
  for (const auto& text : get(store, all, rank_key, deadline, [] {})) {
    RankRecord record;
    std::istringstream fields(text);
    fields >> record.pid >> record.socket_name >> record.secret >>
        record.place >> record.host >> record.cores;
    if (fields.fail()) {
      const int rank = static_cast<int>(records.size());
      throw StoreError("another program wrote the store entry of rank " +
                           std::to_string(rank) +
                           "; give each job its own store",
                       {.operation = kOperation, .peers = {rank}});
    }
    records.push_back(std::move(record));
  }
  return records;
}

LeaderRecord leader_record(c10d::Store& store,
                           int rank,
                           const Deadline& deadline,
                           const std::function<void()>& look) {
  std::istringstream fields(
      get(store, {rank}, leader_key, deadline, look).front());
  LeaderRecord record;
  fields >> record.address.ip >> record.address.port;
  for (int host_rank = 0; fields >> host_rank;) {
    record.ranks.push_back(host_rank);
  }
  return record;
}

std::optional<Verdict> last_word(c10d::Store& store, int rank) {
  return with_store([&]() -> std::optional<Verdict> {
    if (!store.check({last_word_key(rank)})) return std::nullopt;
    std::istringstream text(store.get_to_str(last_word_key(rank)));
    Verdict verdict;
    text >> verdict.rank >> verdict.time >> std::ws;
    std::getline(text, verdict.reason, '\0');
    return verdict;
  });
}

}  // namespace lockstep::comm::liveness
