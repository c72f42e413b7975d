#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "comm/liveness/records.h"
#include "comm/liveness/watcher.h"
#include "core/same_user.h"
#include "lockstep/core/log.h"

// What comes in by the connections, and what goes out.
namespace lockstep::comm::liveness {
namespace {

/// Time for the news of other deaths to come in before one is named.
constexpr std::chrono::milliseconds kSettle(20);

}  // namespace

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
  on_death(link.rank);
}

void Watcher::on_death(int rank) {
  std::optional<Verdict> verdict;
  if (meeting_at_ != nullptr) {
    try {
      verdict = last_word(*meeting_at_, global_rank(rank));
    } catch (const StoreError& error) {
      log::debug(error.what());
    }
  }
  adopt(verdict.value_or(Verdict{.rank = rank, .time = wall_clock()}), nullptr);
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

}  // namespace lockstep::comm::liveness
