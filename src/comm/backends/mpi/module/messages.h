#pragma once

#include <c10/util/intrusive_ptr.h>
#include <mpi.h>

#include <chrono>
#include <optional>
#include <vector>

#include "comm/backends/mpi/module/message.h"
#include "comm/backends/mpi/module/module.h"
#include "core/clock.h"

namespace lockstep::comm::mpi {

/// The messages of one group that are under way.
///
/// Thread safety: all members.
class Messages {
 public:
  /// Collective over the members.
  explicit Messages(Members members);
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  /// Starts to send or receive. A message without bytes travels, too. Throws
  /// std::runtime_error.
  void post(const c10::intrusive_ptr<Message>& message);

  /// Completes the messages that have arrived, and with an error those whose
  /// peer has ended. Throws std::runtime_error when MPI cannot be used.
  void progress();

  /// The last call. Receives are cancelled; where that cannot be, or a member
  /// has died, MPI is given up. Sends that no peer has taken stay behind.
  ///
  /// Unless the members are done and everything was received, the communicators
  /// stay: MPI would take one again for another group, and messages of this one
  /// would be received there.
  void close(bool members_are_done) noexcept;

 private:
  using Pointer = c10::intrusive_ptr<Message>;
  struct Part {
    Pointer message;
    size_t bytes;
  };

  void post_part(const Pointer& message, size_t start);
  void post_rest(const Pointer& message);
  void post_rests_in_order();
  void take_arrived();
  /// How errors name a rank of the group.
  [[nodiscard]] std::string name(int rank) const;
  void take(const Part& part, MPI_Status& status, bool has_error);
  void fail_orphans();
  [[nodiscard]] bool is_orphan(const Message& message) const;
  void cancel_receives();
  /// Whether any are under way.
  [[nodiscard]] bool receives() const;

  const Members members_;
  /// First parts go through one communicator and the others through another,
  /// where no receive from anyone can take them.
  MPI_Comm first_ = MPI_COMM_NULL;
  MPI_Comm rest_ = MPI_COMM_NULL;

  // Held with the turn at MPI.
  bool closed_ = false;
  std::vector<MPI_Request> requests_;
  std::vector<Part> parts_;  ///< of the requests, in the order of posting
  std::vector<int> arrived_;
  std::vector<MPI_Status> statuses_;
  /// Receives of several parts whose first has not come, or not in its turn.
  std::vector<Pointer> unfinished_;
  Clock::time_point next_look_{};
  std::vector<std::optional<Clock::time_point>> ended_since_;  ///< by rank
};

}  // namespace lockstep::comm::mpi
