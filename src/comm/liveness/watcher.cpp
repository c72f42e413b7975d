#include "comm/liveness/watcher.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/liveness/registry.h"
#include "comm/uncaught.h"
#include "core/block_signals.h"

namespace lockstep::comm {

std::shared_ptr<Liveness> Liveness::start(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int world_size,
    std::chrono::milliseconds timeout) {
  return liveness::start(
      store, rank, world_size, timeout, [](int) { return true; });
}

std::shared_ptr<Liveness> Liveness::start_part(
    const Liveness& whole,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout) {
  const auto& host_ranks = whole.host_ranks();
  const auto may_share_host = [&](int rank) {
    return std::binary_search(
        host_ranks.begin(), host_ranks.end(), ranks.at(rank));
  };
  auto watcher = std::make_shared<liveness::Watcher>(whole, ranks);
  watcher->meet(*store, timeout, may_share_host);
  watcher->watch();
  return watcher;
}

std::optional<int> Liveness::rank_of(int global_rank) const {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (this->global_rank(rank) == global_rank) return rank;
  }
  return std::nullopt;
}

void Liveness::be_part_of(const Liveness& whole,
                          const std::vector<int>& ranks) {
  global_ranks_ = whole.global_ranks(ranks);
  global_world_size_ = whole.global_world_size();
  part_of_crowd_ = whole.is_crowded();
}

namespace liveness {
namespace {

/// How long the end of a rank waits for those whose news it passes on.
constexpr std::chrono::milliseconds kLinger(5000);

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
    watcher->watch();
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

Watcher::Watcher(const Liveness& whole, const std::vector<int>& ranks)
    : Watcher(
          static_cast<int>(std::find(ranks.begin(), ranks.end(), whole.rank()) -
                           ranks.begin()),
          static_cast<int>(ranks.size())) {
  be_part_of(whole, ranks);
}

Watcher::~Watcher() {
  remove_from_registry(*this);
  leave();
  linger();
  stop();
}

void Watcher::watch() {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) {
    throw BackendError(
        std::string("cannot make an eventfd: ") + std::strerror(errno),
        error_context(),
        errno);
  }
  const BlockSignals block;
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "lockstep-live");
    while (!stopping_) step(std::chrono::hours(1));
  });
  add_to_registry(*this);
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

void Watcher::announce_failure(const std::string& reason,
                               std::optional<int> culprit) {
  if (owner_ != ::getpid()) return;
  const int accused = culprit.value_or(rank_);
  // An empty reason means a death without a word.
  std::string text = reason.empty() ? "no reason was given" : reason;
  if (accused != rank_) {
    text = "rank " + std::to_string(global_rank(rank_)) +
           " gave up on it: " + text;
  }
  const Verdict verdict{
      accused, wall_clock(), text.substr(0, Channel::kMaxText)};
  bool consequence = false;
  {
    const std::lock_guard lock(mutex_);
    if (said_goodbye_) return;
    said_goodbye_ = true;
    consequence = verdict_.has_value();
    if (!consequence) verdict_ = verdict;
  }
  if (!consequence) spread(message_of(verdict), nullptr);
  if (consequence || accused != rank_) {
    spread({.type = MessageType::Left, .rank = rank_}, nullptr);
  }
  if (consequence) return;
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
  context.peers = global_ranks(gave_up_->missing);
  return TimeoutError(gave_up_text(), std::move(context));
}

std::string Watcher::gave_up_text() const {
  return name_of(gave_up_->rank) + " gave up waiting for " +
         list_of(gave_up_->missing) +
         "; look there for a process that is stopped, slower or in other code, "
         "or raise the timeout";
}

void Watcher::send_fd(int peer, const std::string& name, int fd) {
  ErrorContext context = error_context();
  context.peers = {global_rank(peer)};
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
    ErrorContext context = error_context();
    context.peers = {global_rank(peer)};
    context.elapsed = deadline.elapsed();
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
    context.peers = {global_rank(verdict_->rank)};
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
    if (gave_up_) {
      context.peers = global_ranks(gave_up_->missing);
      return PeerLost(name_of(rank) + " left after " + gave_up_text(), context);
    }
    context.peers = {global_rank(rank)};
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
  return "rank " + std::to_string(global_rank(rank)) + " (pid " +
         std::to_string(peer.pid) + ", host " + peer.host + ')';
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
