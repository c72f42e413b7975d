#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/blame.h"
#include "comm/liveness/cores.h"
#include "comm/liveness/place.h"
#include "comm/liveness/records.h"
#include "comm/liveness/watcher.h"
#include "core/host.h"
#include "core/same_user.h"
#include "lockstep/core/log.h"

// How the ranks find and connect with each other, on the thread that calls
// `Watcher::meet`.
namespace lockstep::comm::liveness {
namespace {

/// Hosts that one host passes the news to.
constexpr int kFanOut = 8;

/// The address to be reached at by other hosts: the one on the way to the
/// store.
std::string own_address(const c10d::Store& store) {
  const auto* inner = &store;
  if (const auto* prefixed = dynamic_cast<const c10d::PrefixStore*>(inner)) {
    inner = const_cast<c10d::PrefixStore*>(prefixed)
                ->getUnderlyingNonPrefixStore()
                .get();
  }
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner)) {
    if (const auto address = address_towards(tcp->getHost())) return *address;
  }
  return first_address();
}

}  // namespace

void Watcher::meet(c10d::Store& store,
                   std::chrono::milliseconds timeout,
                   const MayShareHost& may_share_host) {
  const Deadline deadline(timeout);
  meeting_at_ = &store;
  try {
    publish_and_read(deadline);
    call_host(may_share_host, deadline);
    await(host_ranks_, deadline);
    count_host_cores();
    unix_listener_.reset();
    if (!single_host() && host_ranks_.front() == rank_) join_tree(deadline);
  } catch (const std::exception& error) {
    announce_current_exception(*this, error.what());
    leave_last_word();
    meeting_at_ = nullptr;
    throw;
  }
  meeting_at_ = nullptr;
  std::erase_if(links_, [](const auto& link) { return !link->verified; });
}

void Watcher::publish_and_read(const Deadline& deadline) {
  const RankRecord own = {.pid = owner_,
                          .socket_name = "lockstep-" + random_hex(16),
                          .secret = random_hex(16),
                          .place = place_of(rank_),
                          .host = host_name(),
                          .cores = own_cores()};
  unix_listener_ = listen_abstract(own.socket_name, 2 * world_size_);
  std::vector<int> all;
  for (int rank = 0; rank < world_size_; ++rank) {
    all.push_back(global_rank(rank));
  }
  publish(*meeting_at_, all[rank_], own);
  const auto records = rank_records(*meeting_at_, all, deadline);
  for (int rank = 0; rank < world_size_; ++rank) {
    static_cast<RankRecord&>(peers_[rank]) = records[rank];
  }
  if (peers_[rank_].secret != own.secret) {
    ErrorContext context = error_context();
    context.peers = {all[rank_]};
    throw StoreError("another process wrote the store entry of rank " +
                         std::to_string(all[rank_]) +
                         "; give each rank its own number, and each job its "
                         "own store",
                     context);
  }
  peers_[rank_].met = true;
}

void Watcher::count_host_cores() {
  std::vector<std::string> cores;
  for (const int rank : host_ranks_) cores.push_back(peers_[rank].cores);
  host_cores_ = count_together(cores);
}

void Watcher::call_host(const MayShareHost& may_share_host,
                        const Deadline& deadline) {
  host_ranks_.clear();
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) host_ranks_.push_back(rank_);
    if (peer == rank_ || !may_share_host(peer) ||
        peers_[peer].place != peers_[rank_].place) {
      continue;
    }
    Fd socket = call(peer, deadline);
    if (!socket) continue;
    host_ranks_.push_back(peer);
    const bool calls_us = peer > rank_;
    if (calls_us) callers_due_.insert(peer);
    links_.push_back(std::make_unique<Link>(
        Link{.channel = Channel(std::move(socket)),
             .kind = calls_us ? Link::Kind::Probe : Link::Kind::Caller,
             .same_host = true,
             .rank = peer}));
    if (!calls_us) greet(*links_.back());
  }
}

/// A connection to a rank of the same place; none where a security policy keeps
/// the two apart: they count as of different hosts.
Fd Watcher::call(int peer, const Deadline& deadline) {
  Fd socket;
  while (true) {
    switch (connect_abstract(peers_[peer].socket_name, socket)) {
      case Reached::Yes:
        return same_user(socket.get()) ? std::move(socket) : Fd();
      case Reached::Forbidden:
        return {};
      case Reached::NobodyThere:
        // It listened when it published the name, and would until we had met.
        on_death(peer);
        await({peer}, deadline);
        return {};
      case Reached::TryAgain:
        if (deadline.passed()) await({peer}, deadline);
        // Whoever fills that queue may itself wait for room in ours.
        accept_callers();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void Watcher::join_tree(const Deadline& deadline) {
  LeaderRecord own = {.address = {}, .ranks = host_ranks_};
  tcp_listener_ =
      listen_tcp(own_address(*meeting_at_), 2 * kFanOut, own.address);
  publish(*meeting_at_, global_rank(rank_), own);
  const auto look = [this] {
    step(std::chrono::milliseconds(0));
    const auto lost = peer_lost(host_ranks_, error_context());
    if (lost) throw *lost;
  };

  // The lowest rank that belongs to no known host leads the next one.
  constexpr int kNowhere = -1;
  std::vector<int> leaders;
  std::vector<TcpAddress> addresses;
  std::vector<int> place_of(world_size_, kNowhere);  // by rank: its host's
  while (true) {
    const auto next = std::find(place_of.begin(), place_of.end(), kNowhere);
    if (next == place_of.end()) break;
    const int leader = static_cast<int>(next - place_of.begin());
    const auto host = static_cast<int>(leaders.size());
    const auto record =
        leader_record(*meeting_at_, global_rank(leader), deadline, look);
    place_of[leader] = host;
    for (const int rank : record.ranks) place_of.at(rank) = host;
    leaders.push_back(leader);
    addresses.push_back(record.address);
  }

  const int place = place_of[rank_];
  for (int rank = 0; rank < world_size_; ++rank) {
    int host = place_of[rank];
    while (host > place) host = (host - 1) / kFanOut;
    if (host == place && rank != rank_) heard_through_us_.push_back(rank);
  }
  std::vector<int> neighbours;
  for (int i = 0; i < kFanOut; ++i) {
    const auto child = static_cast<size_t>(place * kFanOut + 1 + i);
    if (child >= leaders.size()) break;
    neighbours.push_back(leaders[child]);
    callers_due_.insert(leaders[child]);
  }
  if (place > 0) {
    const int parent = (place - 1) / kFanOut;
    neighbours.push_back(leaders[parent]);
    links_.push_back(std::make_unique<Link>(
        Link{.channel = Channel(connect_tcp(addresses[parent], deadline)),
             .kind = Link::Kind::Caller,
             .same_host = false,
             .rank = leaders[parent]}));
    greet(*links_.back());
  }
  await(neighbours, deadline);
  tcp_listener_.reset();
}

void Watcher::await(const std::vector<int>& ranks, const Deadline& deadline) {
  const auto missing = [&] {
    std::vector<int> result;
    for (const int rank : ranks) {
      if (!peers_[rank].met) result.push_back(rank);
    }
    return result;
  };
  for (auto due = missing(); !due.empty(); due = missing()) {
    ErrorContext context = error_context();
    context.elapsed = deadline.elapsed();
    if (const auto lost = peer_lost(due, context)) throw *lost;
    if (deadline.passed()) {
      context.peers = global_ranks(due);
      throw TimeoutError(list_of(due) +
                             " did not connect in time; it may be stopped, or "
                             "have waited for other ranks",
                         context);
    }
    step(deadline.remaining());
  }
}

void Watcher::greet(Link& link) {
  send(link,
       {.type = MessageType::Hello,
        .rank = rank_,
        .text = peers_[link.rank].secret});
}

/// What a rank that gave up while the ranks met had to say.
void Watcher::leave_last_word() noexcept {
  std::optional<Verdict> verdict;
  {
    const std::lock_guard lock(mutex_);
    verdict = verdict_;
  }
  if (!verdict) return;
  try {
    publish(*meeting_at_, global_rank(rank_), *verdict);
  } catch (const std::exception& error) {
    log::debug(std::string("the store was lost: ") + error.what());
  }
}

}  // namespace lockstep::comm::liveness
