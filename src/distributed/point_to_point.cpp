#include "lockstep/distributed/point_to_point.h"

#include <utility>

#include "comm/p2p/message_backend.h"
#include "distributed/call.h"
#include "distributed/work.h"

namespace lockstep {
namespace {

using comm::p2p::Direction;
using distributed::Call;
using distributed::contiguous;
using distributed::CopyBack;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Exactly one of the two must be given.
int required_rank(const Call& call,
                  const char* name,
                  std::optional<int> global,
                  std::optional<int> in_group) {
  if (!global && !in_group) {
    const std::string text(name);
    call.fail(text + " or group_" + text + " must be given");
  }
  return call.group_rank(name, global, in_group);
}

void check_tag(const Call& call, int tag) {
  if (tag < 0) {
    call.fail("tag is " + std::to_string(tag) + "; it must not be negative");
  }
}

/// The checked arguments of one send or receive.
struct Message {
  Direction direction;
  at::Tensor tensor;
  std::optional<int> peer;  ///< in the group
  int tag;
};

Message to_send(const Call& call,
                const at::Tensor& tensor,
                const SendOptions& options) {
  call.check_tensor(tensor, "tensor");
  check_tag(call, options.tag);
  return {Direction::kSend,
          tensor,
          required_rank(call, "dst", options.dst, options.group_dst),
          options.tag};
}

Message to_receive(const Call& call,
                   const at::Tensor& tensor,
                   const RecvOptions& options) {
  call.check_output(tensor, "tensor");
  check_tag(call, options.tag);
  std::optional<int> source;
  if (options.src || options.group_src) {
    source = call.group_rank("src", options.src, options.group_src);
  }
  return {Direction::kReceive, tensor, source, options.tag};
}

/// Starts it on `tensor`, which is contiguous.
WorkPtr start(const Call& call, const Message& message, at::Tensor tensor) {
  auto& backend = call.backend();
  if (auto* own = dynamic_cast<comm::p2p::MessageBackend*>(&backend)) {
    return own->transfer(message.direction,
                         tensor,
                         message.peer,
                         message.tag,
                         call.timeout(),
                         call.is_async());
  }
  if (call.timeout() != c10d::kUnsetTimeout) {
    call.fail<Unsupported>(
        "backend " + call.group().backend_name +
        " of an interop group has no timeout for single messages; leave it out "
        "or give it to wait()");
  }
  std::vector<at::Tensor> tensors = {std::move(tensor)};
  if (message.direction == Direction::kSend) {
    return backend.send(tensors, *message.peer, message.tag);
  }
  if (message.peer) return backend.recv(tensors, *message.peer, message.tag);
  return backend.recvAnysource(tensors, message.tag);
}

struct Started {
  Work work;  ///< ended where the call is synchronous
  WorkPtr of_backend;
};

Started run(Call& call, const Message& message) {
  const auto tensor = contiguous(message.tensor);
  WorkPtr of_backend;
  const auto begin = [&] { return of_backend = start(call, message, tensor); };
  if (message.direction == Direction::kSend) {
    return {call.run(begin, [tensor] {}), of_backend};
  }
  return {call.run(begin, CopyBack{{tensor}, {message.tensor}}), of_backend};
}

/// In the default group.
int source_of(const distributed::Group& group, const c10d::Work& work) {
  const int source = work.sourceRank();
  return source < 0 ? -1 : group.ranks.at(static_cast<size_t>(source));
}

Call call_of(const char* operation, const auto& options, bool async) {
  return {operation, options.group, options.timeout, async};
}

}  // namespace

RecvWork::RecvWork(Work work, std::function<int()> source_rank)
    : Work(std::move(work)), source_rank_(std::move(source_rank)) {
}

int RecvWork::source_rank() const {
  return source_rank_();
}

void send(const at::Tensor& tensor, const SendOptions& options) {
  auto call = call_of("send", options, false);
  if (!call.is_member()) return;
  const auto message = to_send(call, tensor, options);
  if (*message.peer == call.group().rank) {
    call.fail(
        "the receiver is this rank itself, which would wait for ever; "
        "use isend and irecv");
  }
  run(call, message);
}

int recv(at::Tensor& tensor, const RecvOptions& options) {
  auto call = call_of("recv", options, false);
  if (!call.is_member()) return -1;
  const auto started = run(call, to_receive(call, tensor, options));
  return source_of(call.group(), *started.of_backend);
}

Work isend(const at::Tensor& tensor, const SendOptions& options) {
  auto call = call_of("isend", options, true);
  if (!call.is_member()) return Work(nullptr);
  return run(call, to_send(call, tensor, options)).work;
}

RecvWork irecv(at::Tensor& tensor, const RecvOptions& options) {
  auto call = call_of("irecv", options, true);
  if (!call.is_member()) return {Work(nullptr), [] { return -1; }};
  auto started = run(call, to_receive(call, tensor, options));
  return {std::move(started.work),
          [group = call.shared_group(), work = started.of_backend] {
            return source_of(*group, *work);
          }};
}

P2POp::P2POp(Work (* /*isend*/)(const at::Tensor&, const SendOptions&),
             at::Tensor tensor_to_send,
             std::optional<int> peer_rank,
             P2POpOptions more)
    : sends(true),
      tensor(std::move(tensor_to_send)),
      peer(peer_rank),
      options(std::move(more)) {
}

P2POp::P2POp(RecvWork (* /*irecv*/)(at::Tensor&, const RecvOptions&),
             at::Tensor tensor_to_fill,
             std::optional<int> peer_rank,
             P2POpOptions more)
    : sends(false),
      tensor(std::move(tensor_to_fill)),
      peer(peer_rank),
      options(std::move(more)) {
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list) {
  constexpr const char* kOperation = "batch_isend_irecv";
  if (p2p_op_list.empty()) {
    throw InvalidArgument("p2p_op_list is empty", {.operation = kOperation});
  }
  std::vector<Call> calls;
  std::vector<Message> messages;
  for (const auto& op : p2p_op_list) {
    calls.push_back(
        {kOperation, op.options.group, std::nullopt, /*async_op=*/true});
    const Call& call = calls.back();
    if (&call.group() != &calls.front().group()) {
      call.fail("all operations of a batch need the same group");
    }
    if (!call.is_member()) return {};
    if (op.sends) {
      messages.push_back(to_send(call,
                                 op.tensor,
                                 {.dst = op.peer,
                                  .tag = op.options.tag,
                                  .group_dst = op.options.group_peer}));
    } else {
      if (!op.peer && !op.options.group_peer) {
        call.fail("peer or group_peer must be given");
      }
      messages.push_back(to_receive(call,
                                    op.tensor,
                                    {.src = op.peer,
                                     .tag = op.options.tag,
                                     .group_src = op.options.group_peer}));
    }
  }
  std::vector<Work> works;
  for (size_t i = 0; i < calls.size(); ++i) {
    works.push_back(run(calls[i], messages[i]).work);
  }
  return works;
}

}  // namespace lockstep
