#pragma once

#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/liveness/socket.h"
#include "comm/liveness/verdict.h"
#include "core/clock.h"

/// What ranks tell each other through the store while they meet. Ranks are
/// global ones.
namespace lockstep::comm::liveness {

/// Of each rank.
struct RankRecord {
  int pid = 0;
  std::string socket_name;  ///< of its abstract Unix socket
  std::string secret;
  std::string place;
  std::string host;
  std::string cores;  ///< that it may use
};

/// Of the lowest rank of each host.
struct LeaderRecord {
  TcpAddress address;
  std::vector<int> ranks;  ///< of its host, numbered as in the group
};

void publish(c10d::Store& store, int rank, const RankRecord& record);
void publish(c10d::Store& store, int rank, const LeaderRecord& record);
/// Why the rank gave up: who was to blame.
void publish(c10d::Store& store, int rank, const Verdict& last_word);

/// The ranks' records, in order.
/// \throws TimeoutError  names those that did not come
std::vector<RankRecord> rank_records(c10d::Store& store,
                                     const std::vector<int>& ranks,
                                     const Deadline& deadline);

/// Calls `look` now and then while it waits.
LeaderRecord leader_record(c10d::Store& store,
                           int rank,
                           const Deadline& deadline,
                           const std::function<void()>& look);

/// Nothing where the rank has not given up.
std::optional<Verdict> last_word(c10d::Store& store, int rank);

}  // namespace lockstep::comm::liveness
