#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "comm/liveness.h"
#include "comm/liveness/channel.h"
#include "comm/liveness/records.h"
#include "comm/liveness/socket.h"
#include "comm/liveness/verdict.h"
#include "lockstep/core/export.h"

namespace lockstep::comm::liveness {

/// Whether `rank` may count as of this host. Tests split one host with it.
using MayShareHost = std::function<bool(int rank)>;

/// `Liveness::start`, where ranks that `may_share_host` excludes are treated
/// as if their sockets could not be reached.
LOCKSTEP_API std::shared_ptr<Liveness> start(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int world_size,
    std::chrono::milliseconds timeout,
    const MayShareHost& may_share_host);

/// The one implementation of Liveness.
///
/// Every rank listens on an abstract Unix socket and publishes its name,
/// secret, place and cores. It then connects to all others of its place: they
/// share its host, unless a security policy forbids it; one that cannot be
/// reached has died. The connection from the higher to the lower rank stays,
/// once each side has presented the other's secret; the other one is only a
/// probe, whose end tells of a death while the ranks meet. The lowest rank of
/// each host joins a tree over TCP with those of the other hosts. Then nothing
/// listens any more and a thread watches the connections.
///
/// A death or failure goes to all ranks before the own user learns of it, so
/// that the news overtakes the end of a rank that leaves because of it.
class Watcher final : public Liveness {
 public:
  Watcher(int rank, int world_size);
  /// Of some ranks of `whole`.
  Watcher(const Liveness& whole, const std::vector<int>& ranks);
  ~Watcher() override;

  /// Connects with the others.
  void meet(c10d::Store& store,
            std::chrono::milliseconds timeout,
            const MayShareHost& may_share_host);
  /// Starts the thread.
  void watch();

  /// At the end of the process: says goodbye and ends the thread.
  void end_with_process() noexcept;
  /// In a forked child: closes its copies of the connections, which would
  /// otherwise hide the parent's death.
  void close_in_forked_child() noexcept;

  const std::vector<int>& host_ranks() const override { return host_ranks_; }
  int host_cores() const override { return host_cores_; }
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::optional<PeerFailure> failure() const override;
  bool has_left(int rank) const override;
  uint64_t subscribe(std::function<void()> callback) override;
  void unsubscribe(uint64_t id) override;
  void announce_failure(const std::string& reason,
                        std::optional<int> culprit) override;
  void leave() noexcept override;
  void send_fd(int peer, const std::string& name, int fd) override;
  Fd receive_fd(int peer,
                const std::string& name,
                std::chrono::milliseconds timeout) override;
  std::optional<PeerLost> peer_lost(const std::vector<int>& waiting_for,
                                    ErrorContext context) const override;
  std::vector<std::optional<uint64_t>> ask_progress(
      std::chrono::milliseconds limit) override;
  void announce_timeout(const std::vector<int>& ranks) override;
  std::optional<TimeoutError> timed_out(ErrorContext context) const override;

 private:
  /// What a rank publishes of itself, and what became of it.
  struct Peer : RankRecord {
    bool met = false;   ///< both sides know each other
    bool left = false;  ///< guarded by mutex_
  };

  struct Link {
    enum class Kind { Caller, Answerer, Probe };
    Channel channel;
    Kind kind;
    bool same_host;
    int rank = -1;  ///< of the other end; -1 until an answerer knows it
    bool verified = false;
  };

  /// A rank that waited for others in vain.
  struct GaveUp {
    int rank;
    std::vector<int> missing;
  };

  // The meeting, on the thread that calls `meet`.
  void publish_and_read(const Deadline& deadline);
  void call_host(const MayShareHost& may_share_host, const Deadline& deadline);
  void count_host_cores();
  Fd call(int peer, const Deadline& deadline);
  void join_tree(const Deadline& deadline);
  void await(const std::vector<int>& ranks, const Deadline& deadline);
  void greet(Link& link);
  void leave_last_word() noexcept;

  // Events, on that thread and then on the own one.
  void step(std::chrono::milliseconds limit);
  void accept_callers();
  void receive(Link& link);
  void on_message(Link& link, Message message, Fd descriptor);
  void on_hello(Link& link, const Message& message);
  /// What this rank learnt before the connection stood.
  void tell_old_news(Link& link);
  void on_end(Link& link);
  /// Nothing was heard of the rank before it went.
  void on_death(int rank);
  void on_left(int rank, const Link& source);
  void on_ask(const Message& message, Link& link);
  void on_progress(const Message& message);
  void on_gave_up(const Message& message, const Link* source);
  [[nodiscard]] std::vector<int> ranks_in(const std::string& text) const;
  void adopt(Verdict verdict, Link* source);
  void publish_verdict();
  static Message message_of(const Verdict& verdict);
  void run_callbacks();

  bool send(Link& link, const Message& message, int descriptor = -1) noexcept;
  /// To all, except back to `source`; what came from this host goes to other
  /// hosts only, since its ranks are all connected with each other.
  void spread(const Message& message, const Link* source) noexcept;
  void wake() noexcept;
  /// Stays until all whose news pass through this rank have left, for a bound.
  void linger() noexcept;
  void stop() noexcept;
  [[nodiscard]] std::optional<PeerLost> peer_lost_locked(
      const std::vector<int>& waiting_for, ErrorContext context) const;
  [[nodiscard]] std::string gave_up_text() const;
  [[nodiscard]] std::string name_of(int rank) const;
  [[nodiscard]] std::string list_of(const std::vector<int>& ranks) const;

  const int rank_;
  const int world_size_;
  const pid_t owner_;  ///< the process; another one is a forked child
  std::vector<int> host_ranks_;
  int host_cores_ = 1;
  std::vector<Peer> peers_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Link*> link_to_;        ///< by rank; null: no direct connection
  std::vector<Link*> asked_through_;  ///< by rank: where its question came from
  std::vector<int> heard_through_us_;  ///< by the rest of the tree
  std::set<int> callers_due_;          ///< ranks that will connect to this one
  c10d::Store* meeting_at_ = nullptr;  ///< while the ranks meet
  Fd unix_listener_;
  Fd tcp_listener_;
  Fd wake_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};

  std::mutex send_mutex_;  ///< sending on, and closing of, connections

  mutable std::mutex mutex_;  ///< all below
  std::condition_variable changed_;
  std::optional<Verdict> verdict_;
  bool verdict_published_ = false;
  std::optional<Clock::time_point> publish_at_;
  std::optional<GaveUp> gave_up_;  ///< the first that this rank heard of
  std::vector<std::optional<uint64_t>>
      answers_;  ///< by rank, to `ask_progress`
  bool said_goodbye_ = false;
  bool news_ = false;  ///< callbacks are due
  std::map<std::pair<int, std::string>, std::deque<Fd>> descriptors_;

  std::mutex callbacks_mutex_;  ///< held while they run
  std::map<uint64_t, std::function<void()>> callbacks_;
  uint64_t next_callback_ = 1;
};

}  // namespace lockstep::comm::liveness
