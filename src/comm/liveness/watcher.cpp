#include "comm/liveness/watcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <numeric>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/liveness/registry.h"
#include "comm/uncaught.h"
#include "lockstep/core/log.h"

namespace lockstep::comm {

std::shared_ptr<Liveness> Liveness::start(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int world_size,
    std::chrono::milliseconds timeout) {
  return liveness::start(
      store, rank, world_size, timeout, [](int) { return true; });
}

namespace liveness {
namespace {

constexpr const char* kOperation = "init_process_group";
/// Time for the news of other deaths to come in before one is named.
constexpr std::chrono::milliseconds kSettle(20);
/// Hosts that one host passes the news to.
constexpr int kFanOut = 8;
/// How long the end of a rank waits for those whose news it passes on.
constexpr std::chrono::milliseconds kLinger(5000);

int64_t wall_clock() {
  return std::chrono::nanoseconds(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string peer_key(int rank) {
  return "liveness/" + std::to_string(rank);
}

std::string leader_key(int rank) {
  return "liveness/leader/" + std::to_string(rank);
}

void set(c10d::Store& store, const std::string& key, const std::string& text) {
  try {
    store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
  } catch (const std::exception& error) {
    throw StoreError(std::string("cannot write to the store: ") + error.what(),
                     {.operation = kOperation});
  }
}

/// Waits for the keys of `ranks`; an error names those that did not come.
std::vector<std::string> get(c10d::Store& store,
                             const std::vector<int>& ranks,
                             std::string (*key_of)(int),
                             const Deadline& deadline) {
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (const int rank : ranks) keys.push_back(key_of(rank));
  std::vector<std::vector<uint8_t>> values;
  try {
    // Zero would mean to wait for ever.
    store.wait(keys,
               std::max(deadline.remaining(), std::chrono::milliseconds(1)));
    if (store.hasExtendedApi()) {
      values = store.multiGet(keys);
    } else {
      for (const auto& key : keys) values.push_back(store.get(key));
    }
  } catch (const std::exception& error) {
    ErrorContext context{.operation = kOperation,
                         .elapsed = deadline.elapsed()};
    std::string names;
    try {
      for (size_t i = 0; i < keys.size(); ++i) {
        if (store.check({keys[i]})) continue;
        context.peers.push_back(ranks[i]);
        names += (names.empty() ? "" : ", ") + std::to_string(ranks[i]);
      }
    } catch (const std::exception&) {
      context.peers.clear();
    }
    if (context.peers.empty()) {
      throw StoreError(
          std::string("cannot read from the store: ") + error.what(), context);
    }
    throw TimeoutError("rank " + names +
                           " did not arrive; look at its own output, and "
                           "whether it was started at all",
                       context);
  }
  std::vector<std::string> texts;
  texts.reserve(values.size());
  for (const auto& value : values)
    texts.emplace_back(value.begin(), value.end());
  return texts;
}

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

std::shared_ptr<Liveness> start(const c10::intrusive_ptr<c10d::Store>& store,
                                int rank,
                                int world_size,
                                std::chrono::milliseconds timeout,
                                const MayShareHost& may_share_host) {
  auto watcher = std::make_shared<Watcher>(rank, world_size);
  if (world_size > 1) {
    install_uncaught_handler();
    watcher->meet(*store, timeout, may_share_host);
  }
  return watcher;
}

Watcher::Watcher(int rank, int world_size)
    : rank_(rank),
      world_size_(world_size),
      owner_(::getpid()),
      host_ranks_{rank},
      peers_(world_size),
      link_to_(world_size),
      asked_through_(world_size),
      answers_(world_size) {
}

Watcher::~Watcher() {
  remove_from_registry(*this);
  leave();
  linger();
  stop();
}

// --- The meeting ---

void Watcher::meet(c10d::Store& store,
                   std::chrono::milliseconds timeout,
                   const MayShareHost& may_share_host) {
  const Deadline deadline(timeout);
  try {
    publish(store, deadline);
    call_host(may_share_host, deadline);
    await(host_ranks_, deadline);
    unix_listener_.reset();
    if (!single_host() && host_ranks_.front() == rank_) {
      join_tree(store, deadline);
    }
  } catch (const std::exception& error) {
    announce_failure(error.what());
    throw;
  }
  std::erase_if(links_, [](const auto& link) { return !link->verified; });

  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) {
    throw BackendError(
        std::string("cannot make an eventfd: ") + std::strerror(errno),
        {.operation = kOperation},
        errno);
  }
  // Signals are for the user's threads.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "lockstep-live");
    while (!stopping_) step(std::chrono::hours(1));
  });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  add_to_registry(*this);
}

void Watcher::publish(c10d::Store& store, const Deadline& deadline) {
  const auto secret = random_hex(16);
  const auto socket_name = "lockstep-" + random_hex(16);
  unix_listener_ = listen_abstract(socket_name, 2 * world_size_);
  std::ostringstream record;
  record << owner_ << ' ' << socket_name << ' ' << secret << ' ' << host_name();
  set(store, peer_key(rank_), record.str());

  std::vector<int> all(world_size_);
  std::iota(all.begin(), all.end(), 0);
  const auto records = get(store, all, peer_key, deadline);
  for (const int rank : all) {
    std::istringstream fields(records[rank]);
    Peer& peer = peers_[rank];
    fields >> peer.pid >> peer.socket_name >> peer.secret >> peer.host;
    if (fields.fail() || (rank == rank_ && peer.secret != secret)) {
      throw StoreError("another process wrote the store entry of rank " +
                           std::to_string(rank) +
                           "; give each rank its own number, and each job its "
                           "own store",
                       {.operation = kOperation, .peers = {rank}});
    }
  }
  peers_[rank_].met = true;
}

void Watcher::call_host(const MayShareHost& may_share_host,
                        const Deadline& deadline) {
  host_ranks_.clear();
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) host_ranks_.push_back(rank_);
    if (peer == rank_ || !may_share_host(peer)) continue;
    Fd socket;
    Reached reached;
    while ((reached = connect_abstract(peers_[peer].socket_name, socket)) ==
           Reached::TryAgain) {
      if (deadline.passed()) await({peer}, deadline);
      // Whoever fills that queue may itself wait for room in ours.
      accept_callers();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (reached == Reached::No) continue;
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

void Watcher::join_tree(c10d::Store& store, const Deadline& deadline) {
  TcpAddress own;
  tcp_listener_ = listen_tcp(own_address(store), 2 * kFanOut, own);
  std::ostringstream record;
  record << own.ip << ' ' << own.port;
  for (const int rank : host_ranks_) record << ' ' << rank;
  set(store, leader_key(rank_), record.str());

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
    std::istringstream fields(
        get(store, {leader}, leader_key, deadline).front());
    TcpAddress address;
    fields >> address.ip >> address.port;
    place_of[leader] = host;
    for (int rank = 0; fields >> rank;) place_of.at(rank) = host;
    leaders.push_back(leader);
    addresses.push_back(address);
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
    ErrorContext context{.operation = kOperation,
                         .rank = rank_,
                         .world_size = world_size_,
                         .elapsed = deadline.elapsed()};
    if (const auto lost = peer_lost(due, context)) throw *lost;
    if (deadline.passed()) {
      context.peers = due;
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

// --- Events ---

void Watcher::step(std::chrono::milliseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    if (publish_at_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(
          *publish_at_ - Clock::now());
      limit = std::clamp(left, std::chrono::milliseconds(0), limit);
    }
  }
  std::vector<pollfd> polls;
  for (const auto* fd : {&wake_, &unix_listener_, &tcp_listener_}) {
    polls.push_back({.fd = fd->get(), .events = POLLIN, .revents = 0});
  }
  const auto before_links = polls.size();
  const auto links = links_.size();
  for (const auto& link : links_) {
    polls.push_back({.fd = link->channel.fd(), .events = POLLIN, .revents = 0});
  }
  const auto wait = std::min<int64_t>(limit.count(), INT_MAX);
  if (::poll(polls.data(), polls.size(), static_cast<int>(wait)) > 0) {
    if (polls[0].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const auto n = ::read(wake_.get(), &count, sizeof count);
    }
    for (size_t i = 0; i < links; ++i) {
      if (polls[before_links + i].revents != 0) receive(*links_[i]);
    }
    accept_callers();
  }
  bool due = false;
  {
    const std::lock_guard lock(mutex_);
    due = publish_at_ && Clock::now() >= *publish_at_;
  }
  if (due) publish_verdict();
  run_callbacks();
}

void Watcher::accept_callers() {
  for (const auto* listener : {&unix_listener_, &tcp_listener_}) {
    const bool same_host = listener == &unix_listener_;
    while (*listener) {
      Fd socket = accept_one(*listener);
      if (!socket) break;
      if (same_host && !same_user(socket.get())) {
        log::debug("a process of another user was refused");
        continue;
      }
      links_.push_back(
          std::make_unique<Link>(Link{.channel = Channel(std::move(socket)),
                                      .kind = Link::Kind::Answerer,
                                      .same_host = same_host}));
    }
  }
}

void Watcher::receive(Link& link) {
  while (link.channel.is_open()) {
    Message message;
    Fd descriptor;
    switch (link.channel.receive(message, descriptor)) {
      case Channel::Receipt::Message:
        on_message(link, std::move(message), std::move(descriptor));
        break;
      case Channel::Receipt::Nothing:
        return;
      case Channel::Receipt::Closed:
        on_end(link);
        return;
    }
  }
}

void Watcher::on_message(Link& link, Message message, Fd descriptor) {
  if (!link.verified) {
    on_hello(link, message);
    return;
  }
  if (message.rank < 0 || message.rank >= world_size_) return;
  switch (message.type) {
    case MessageType::Failure:
      adopt({message.rank, message.number, std::move(message.text)}, &link);
      break;
    case MessageType::Left:
      on_left(message.rank, link);
      break;
    case MessageType::Ask:
      on_ask(message, link);
      break;
    case MessageType::Progress:
      on_progress(message);
      break;
    case MessageType::GaveUp:
      on_gave_up(message, &link);
      break;
    case MessageType::Descriptor: {
      const std::lock_guard lock(mutex_);
      descriptors_[{link.rank, std::move(message.text)}].push_back(
          std::move(descriptor));
      changed_.notify_all();
      break;
    }
    case MessageType::Hello:
      break;
  }
}

void Watcher::on_hello(Link& link, const Message& message) {
  const bool welcome =
      message.type == MessageType::Hello &&
      equal_in_constant_time(message.text, peers_[rank_].secret) &&
      (link.kind == Link::Kind::Caller ? message.rank == link.rank
                                       : callers_due_.erase(message.rank) == 1);
  if (!welcome) {
    log::debug("a connection without this rank's secret was refused");
    on_end(link);
    return;
  }
  link.rank = message.rank;
  link.verified = true;
  link_to_[link.rank] = &link;
  peers_[link.rank].met = true;
  if (link.kind == Link::Kind::Answerer) {
    greet(link);
    for (const auto& other : links_) {
      if (other->kind == Link::Kind::Probe && other->rank == link.rank) {
        other->channel.close();
      }
    }
  }
  tell_old_news(link);
}

void Watcher::tell_old_news(Link& link) {
  std::vector<Message> news;
  {
    const std::lock_guard lock(mutex_);
    if (verdict_) news.push_back(message_of(*verdict_));
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!peers_[rank].left) continue;
      news.push_back({.type = MessageType::Left, .rank = rank});
    }
  }
  for (const auto& message : news) send(link, message);
}

void Watcher::on_end(Link& link) {
  {
    const std::lock_guard lock(send_mutex_);
    link.channel.close();
  }
  if (link.rank < 0) return;
  {
    const std::lock_guard lock(mutex_);
    if (peers_[link.rank].left) return;
  }
  adopt({link.rank, wall_clock(), {}}, nullptr);
}

void Watcher::on_left(int rank, const Link& source) {
  bool culprit_known = false;
  {
    const std::lock_guard lock(mutex_);
    if (peers_[rank].left) return;
    peers_[rank].left = true;
    news_ = true;
    culprit_known = verdict_ && !verdict_published_;
  }
  // It may leave because of that culprit: name the one with the other.
  if (culprit_known) publish_verdict();
  disturbed_.store(true, std::memory_order_release);
  changed_.notify_all();
  spread({.type = MessageType::Left, .rank = rank}, &source);
}

void Watcher::on_ask(const Message& message, Link& link) {
  asked_through_[message.rank] = &link;
  send(link,
       {.type = MessageType::Progress,
        .rank = rank_,
        .number = static_cast<int64_t>(progress_.load()),
        .text = std::to_string(message.rank)});
  spread(message, &link);
}

void Watcher::on_progress(const Message& message) {
  const auto asker = ranks_in(message.text);
  if (asker.size() != 1) return;
  if (asker[0] != rank_) {
    if (auto* link = asked_through_[asker[0]]) send(*link, message);
    return;
  }
  const std::lock_guard lock(mutex_);
  answers_[message.rank] = static_cast<uint64_t>(message.number);
  changed_.notify_all();
}

void Watcher::on_gave_up(const Message& message, const Link* source) {
  {
    const std::lock_guard lock(mutex_);
    if (gave_up_) return;
    gave_up_ = GaveUp{message.rank, ranks_in(message.text)};
    news_ = true;
  }
  disturbed_.store(true, std::memory_order_release);
  changed_.notify_all();
  spread(message, source);
}

/// The valid ranks in a message's text.
std::vector<int> Watcher::ranks_in(const std::string& text) const {
  std::vector<int> ranks;
  std::istringstream numbers(text);
  for (int rank = -1; numbers >> rank;) {
    if (rank >= 0 && rank < world_size_) ranks.push_back(rank);
  }
  return ranks;
}

Message Watcher::message_of(const Verdict& verdict) {
  return {.type = MessageType::Failure,
          .rank = verdict.rank,
          .number = verdict.time,
          .text = verdict.reason};
}

void Watcher::adopt(Verdict verdict, Link* source) {
  std::optional<Verdict> better;
  {
    const std::lock_guard lock(mutex_);
    if (!verdict_ || verdict < *verdict_) {
      verdict_ = verdict;
      if (!verdict_published_ && !publish_at_) {
        publish_at_ = Clock::now() + kSettle;
      }
    } else if (*verdict_ < verdict) {
      better = verdict_;
    } else {
      return;
    }
  }
  if (!better) {
    spread(message_of(verdict), source);
  } else if (source != nullptr) {
    send(*source, message_of(*better));
  }
}

void Watcher::publish_verdict() {
  {
    const std::lock_guard lock(mutex_);
    verdict_published_ = true;
    publish_at_.reset();
    news_ = true;
  }
  disturbed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Watcher::run_callbacks() {
  {
    const std::lock_guard lock(mutex_);
    if (!news_) return;
    news_ = false;
  }
  const std::lock_guard lock(callbacks_mutex_);
  for (const auto& [id, callback] : callbacks_) callback();
}

// --- Sending ---

bool Watcher::send(Link& link,
                   const Message& message,
                   int descriptor) noexcept {
  const std::lock_guard lock(send_mutex_);
  return link.channel.is_open() && link.channel.send(message, descriptor);
}

void Watcher::spread(const Message& message, const Link* source) noexcept {
  const bool ours_know = source != nullptr && source->same_host;
  for (const auto& link : links_) {
    if (!link->verified || link.get() == source) continue;
    if (ours_know && link->same_host) continue;
    send(*link, message);
  }
}

void Watcher::wake() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(wake_.get(), &one, sizeof one);
}

void Watcher::linger() noexcept {
  if (!thread_.joinable() || owner_ != ::getpid()) return;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kLinger, [this] {
    return verdict_ || std::all_of(heard_through_us_.begin(),
                                   heard_through_us_.end(),
                                   [this](int r) { return peers_[r].left; });
  });
}

void Watcher::stop() noexcept {
  if (!thread_.joinable()) return;
  if (owner_ != ::getpid()) {
    thread_.detach();  // it exists in the parent only
    return;
  }
  stopping_ = true;
  wake();
  if (thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

void Watcher::end_with_process() noexcept {
  leave();
  linger();
  stop();
}

void Watcher::close_in_forked_child() noexcept {
  for (const auto& link : links_) link->channel.close();
  wake_.reset();
}

// --- The user's side ---

std::optional<PeerFailure> Watcher::failure() const {
  const std::lock_guard lock(mutex_);
  if (!verdict_published_) return std::nullopt;
  const Peer& peer = peers_[verdict_->rank];
  return PeerFailure{.rank = verdict_->rank,
                     .pid = peer.pid,
                     .host = peer.host,
                     .reason = verdict_->reason};
}

bool Watcher::has_left(int rank) const {
  const std::lock_guard lock(mutex_);
  return peers_.at(rank).left;
}

uint64_t Watcher::subscribe(std::function<void()> callback) {
  const std::lock_guard lock(callbacks_mutex_);
  if (disturbed()) callback();
  const auto id = next_callback_++;
  callbacks_.emplace(id, std::move(callback));
  return id;
}

void Watcher::unsubscribe(uint64_t id) {
  const std::lock_guard lock(callbacks_mutex_);
  callbacks_.erase(id);
}

void Watcher::announce_failure(const std::string& reason) {
  if (owner_ != ::getpid()) return;
  // An empty reason means a death without a word.
  Verdict own{rank_,
              wall_clock(),
              reason.empty() ? "no reason was given"
                             : reason.substr(0, Channel::kMaxText)};
  bool consequence = false;
  {
    const std::lock_guard lock(mutex_);
    if (said_goodbye_) return;
    said_goodbye_ = true;
    consequence = verdict_.has_value();
    if (!consequence) verdict_ = own;
  }
  if (consequence) {
    spread({.type = MessageType::Left, .rank = rank_}, nullptr);
    return;
  }
  spread(message_of(own), nullptr);
  publish_verdict();
  wake();
}

void Watcher::leave() noexcept {
  if (owner_ != ::getpid()) return;
  {
    const std::lock_guard lock(mutex_);
    if (said_goodbye_) return;
    said_goodbye_ = true;
  }
  spread({.type = MessageType::Left, .rank = rank_}, nullptr);
}

std::vector<std::optional<uint64_t>> Watcher::ask_progress(
    std::chrono::milliseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    answers_.assign(world_size_, std::nullopt);
    answers_[rank_] = progress_.load();
  }
  spread({.type = MessageType::Ask, .rank = rank_}, nullptr);
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [this] {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!answers_[rank] && !peers_[rank].left) return false;
    }
    return true;
  });
  return answers_;
}

void Watcher::announce_timeout(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += std::to_string(rank) + ' ';
  on_gave_up({.type = MessageType::GaveUp, .rank = rank_, .text = text},
             nullptr);
  wake();
}

std::optional<TimeoutError> Watcher::timed_out(ErrorContext context) const {
  if (!disturbed()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (!gave_up_) return std::nullopt;
  context.peers = gave_up_->missing;
  return TimeoutError(name_of(gave_up_->rank) + " gave up waiting for " +
                          list_of(gave_up_->missing) +
                          "; look there for a process that is stopped, slower "
                          "or in other code, or raise the timeout",
                      std::move(context));
}

void Watcher::send_fd(int peer, const std::string& name, int fd) {
  ErrorContext context{
      .rank = rank_, .world_size = world_size_, .peers = {peer}};
  Link* link = link_to_.at(peer);
  if (link == nullptr || !link->same_host) {
    throw InvalidArgument(
        name_of(peer) +
            " is no other rank of this host; a descriptor cannot "
            "be sent to it",
        context);
  }
  if (name.size() > Channel::kMaxText) {
    throw InvalidArgument("the descriptor's name is too long", context);
  }
  const Message message{
      .type = MessageType::Descriptor, .rank = rank_, .text = name};
  if (send(*link, message, fd)) return;
  // The connection breaks before the death is on record.
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::seconds(1), [&] {
    return peer_lost_locked({peer}, context).has_value();
  });
  if (const auto lost = peer_lost_locked({peer}, context)) throw *lost;
  throw BackendError("cannot send the descriptor \"" + name + "\" to " +
                         name_of(peer) + "; it may be stopped, or be gone",
                     context);
}

Fd Watcher::receive_fd(int peer,
                       const std::string& name,
                       std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  const auto key = std::make_pair(peer, name);
  std::unique_lock lock(mutex_);
  while (true) {
    const auto found = descriptors_.find(key);
    if (found != descriptors_.end()) {
      Fd descriptor = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) descriptors_.erase(found);
      return descriptor;
    }
    const ErrorContext context{.rank = rank_,
                               .world_size = world_size_,
                               .peers = {peer},
                               .elapsed = deadline.elapsed()};
    if (auto lost = peer_lost_locked({peer}, context)) throw *lost;
    if (deadline.passed()) {
      throw TimeoutError("the descriptor \"" + name + "\" of " + name_of(peer) +
                             " did not come in time",
                         context);
    }
    changed_.wait_for(lock, deadline.remaining());
  }
}

std::optional<PeerLost> Watcher::peer_lost(const std::vector<int>& waiting_for,
                                           ErrorContext context) const {
  if (!disturbed()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return peer_lost_locked(waiting_for, std::move(context));
}

std::optional<PeerLost> Watcher::peer_lost_locked(
    const std::vector<int>& waiting_for, ErrorContext context) const {
  if (verdict_published_) {
    context.peers = {verdict_->rank};
    const auto name = name_of(verdict_->rank);
    if (verdict_->reason.empty()) {
      return PeerLost(
          name +
              " died; look for the cause in its own output and in the kernel's "
              "log (out of memory?), then start the job again",
          context);
    }
    return PeerLost(name + " failed: " + verdict_->reason +
                        "; mend that, then start the job again",
                    context);
  }
  for (const int rank : waiting_for) {
    if (!peers_.at(rank).left) continue;
    context.peers = {rank};
    return PeerLost(
        name_of(rank) +
            " left before this was complete; every rank must make the same "
            "calls before destroy_process_group or the end of its program",
        context);
  }
  return std::nullopt;
}

std::string Watcher::name_of(int rank) const {
  const Peer& peer = peers_.at(rank);
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(peer.pid) +
         ", host " + peer.host + ')';
}

std::string Watcher::list_of(const std::vector<int>& ranks) const {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + name_of(rank);
  }
  return text;
}

}  // namespace liveness
}  // namespace lockstep::comm
