#include "comm/liveness/records.h"

#include <sstream>

#include "comm/store_texts.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::liveness {
namespace {

std::string rank_key(int rank) {
  return "liveness/" + std::to_string(rank);
}

std::string leader_key(int rank) {
  return "liveness/leader/" + std::to_string(rank);
}

std::string last_word_key(int rank) {
  return "liveness/last_word/" + std::to_string(rank);
}

}  // namespace

void publish(c10d::Store& store, int rank, const RankRecord& record) {
  std::ostringstream text;
  text << record.pid << ' ' << record.socket_name << ' ' << record.secret << ' '
       << record.place << ' ' << record.host << ' ' << record.cores;
  set_text(store, rank_key(rank), text.str());
}

void publish(c10d::Store& store, int rank, const LeaderRecord& record) {
  std::ostringstream text;
  text << record.address.ip << ' ' << record.address.port;
  for (const int host_rank : record.ranks) text << ' ' << host_rank;
  set_text(store, leader_key(rank), text.str());
}

void publish(c10d::Store& store, int rank, const Verdict& last_word) {
  std::ostringstream text;
  text << last_word.rank << ' ' << last_word.time << ' ' << last_word.reason;
  set_text(store, last_word_key(rank), text.str());
}

std::vector<RankRecord> rank_records(c10d::Store& store,
                                     const std::vector<int>& ranks,
                                     const Deadline& deadline) {
  std::vector<RankRecord> records;
  for (const auto& text : texts_of(store, ranks, rank_key, deadline, [] {})) {
    RankRecord record;
    std::istringstream fields(text);
    fields >> record.pid >> record.socket_name >> record.secret >>
        record.place >> record.host >> record.cores;
    if (fields.fail()) {
      const int rank = ranks[records.size()];
      throw StoreError("another program wrote the store entry of rank " +
                           std::to_string(rank) +
                           "; give each job its own store",
                       {.peers = {rank}});
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
      texts_of(store, {rank}, leader_key, deadline, look).front());
  LeaderRecord record;
  fields >> record.address.ip >> record.address.port;
  for (int host_rank = 0; fields >> host_rank;) {
    record.ranks.push_back(host_rank);
  }
  return record;
}

std::optional<Verdict> last_word(c10d::Store& store, int rank) {
  std::optional<Verdict> verdict;
  with_store([&] {
    if (!store.check({last_word_key(rank)})) return;
    std::istringstream text(store.get_to_str(last_word_key(rank)));
    verdict.emplace();
    text >> verdict->rank >> verdict->time >> std::ws;
    std::getline(text, verdict->reason, '\0');
  });
  return verdict;
}

}  // namespace lockstep::comm::liveness
