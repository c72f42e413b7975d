#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep {

// All below: between two ranks of a group, in any order between different pairs
// and tags, and independent of collectives. Messages from one rank to another
// with one tag arrive in the order of their sends. What is asynchronous goes on
// without its caller; its tensor must not be touched before `Work::wait`
// returned. A send has ended when its receiver has all of it, so two ranks that
// both `send` before they `recv` wait for each other.
//
// Contiguous or not, of any number of elements and any dtype; both sides need
// the same number and dtype, the shapes may differ. Ranks that are no member of
// the group log a warning and do nothing.
//
// On failure: InvalidArgument (no group, wrong arguments), MismatchError (on
// both sides, naming both), TimeoutError, PeerLost, BackendError. After any of
// the last four the group cannot be used again. In an interop group, which
// sends exactly what c10d sends, nothing is compared: unequal sizes end the
// process or leave the receiver's tensor half written, as in PyTorch.

/// Of `send` and `isend`. Exactly one of `dst` and `group_dst` is needed.
struct SendOptions {
  std::optional<int> dst = {};  ///< receiver, its rank in the default group
  int tag = 0;                  ///< not negative; the receive has the same
  ProcessGroup group = {};      ///< empty: the default group
  std::optional<std::chrono::milliseconds> timeout = {};  ///< or the group's
  std::optional<int> group_dst = {};  ///< receiver, its rank in the group
};

/// Of `recv` and `irecv`. Without `src` and `group_src` from any rank.
struct RecvOptions {
  std::optional<int> src = {};  ///< sender, its rank in the default group
  int tag = 0;                  ///< not negative; the send has the same
  ProcessGroup group = {};      ///< empty: the default group
  std::optional<std::chrono::milliseconds> timeout = {};  ///< or the group's
  std::optional<int> group_src = {};  ///< sender, its rank in the group
};

/// Handle of an `irecv`.
///
/// Thread safety: as `Work`.
class LOCKSTEP_API RecvWork : public Work {
 public:
  RecvWork(Work work, std::function<int()> source_rank);

  /// The sender's rank in the default group, once the receive has ended; before
  /// that -1, and always where this rank is no member.
  [[nodiscard]] int source_rank() const;

 private:
  std::function<int()> source_rank_;
};

/// Sends `tensor`; returns when the receiver has it. Not to the own rank.
/// Mirrors `torch.distributed.send`.
LOCKSTEP_API void send(const at::Tensor& tensor, const SendOptions& options);

/// Fills `tensor` with a message; returns the sender's rank in the default
/// group, -1 where this rank is no member. Mirrors `torch.distributed.recv`.
LOCKSTEP_API int recv(at::Tensor& tensor, const RecvOptions& options = {});

/// Starts to send `tensor`, also to the own rank. `destroy_process_group`
/// returns only when the message was delivered or its send has failed. Mirrors
/// `torch.distributed.isend`.
LOCKSTEP_API Work isend(const at::Tensor& tensor, const SendOptions& options);

/// Starts to receive into `tensor`, also from the own rank. Receives that no
/// message has come for end with an error at `destroy_process_group`. Mirrors
/// `torch.distributed.irecv`.
LOCKSTEP_API RecvWork irecv(at::Tensor& tensor,
                            const RecvOptions& options = {});

/// The rest of a P2POp's arguments.
struct P2POpOptions {
  ProcessGroup group = {};  ///< empty: the default group
  int tag = 0;
  std::optional<int> group_peer = {};  ///< the peer by its rank in the group
};

/// One operation of `batch_isend_irecv`: `P2POp(isend, tensor, 1)`. Exactly one
/// of `peer` and `group_peer` is needed. Mirrors `torch.distributed.P2POp`.
struct LOCKSTEP_API P2POp {
  P2POp(Work (*isend)(const at::Tensor&, const SendOptions&),
        at::Tensor tensor,
        std::optional<int> peer,
        P2POpOptions options = {});
  P2POp(RecvWork (*irecv)(at::Tensor&, const RecvOptions&),
        at::Tensor tensor,
        std::optional<int> peer,
        P2POpOptions options = {});

  bool sends;
  at::Tensor tensor;
  std::optional<int> peer;  ///< its rank in the default group
  P2POpOptions options;
};

/// Starts all operations, which are of one group; their order matters only
/// between messages of one direction, peer and tag. All handles must be waited
/// for. Checks all arguments before anything starts. Mirrors
/// `torch.distributed.batch_isend_irecv`.
LOCKSTEP_API std::vector<Work> batch_isend_irecv(
    const std::vector<P2POp>& p2p_op_list);

}  // namespace lockstep
