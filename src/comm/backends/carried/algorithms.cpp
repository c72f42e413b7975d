#include "comm/backends/carried/algorithms.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "comm/kernels/reduce.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::carried {
namespace {

// Up to this size the direct way, in which a byte travels more often but there
// is one exchange instead of two, is the faster one.
constexpr size_t kDirectBytes = 64 * 1024;

// So much of every rank's bytes is at the root of a reduce at a time.
constexpr size_t kReducedAtOnce = 4 * 1024 * 1024;

}  // namespace

void Algorithms::exchange(Transport::Channel channel,
                          std::vector<Message> receives,
                          std::vector<Message> sends,
                          const Deadline& deadline) {
  for (auto* messages : {&receives, &sends}) {
    for (auto& message : *messages) {
      message.peer = members_[static_cast<size_t>(message.peer)];
    }
  }
  transport_.exchange(channel, receives, sends, deadline, give_up_);
}

void Algorithms::exchange_with_all(Transport::Channel channel,
                                   const MessageOf& receive,
                                   const MessageOf& send,
                                   const Deadline& deadline) {
  std::vector<Message> receives;
  std::vector<Message> sends;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    receives.push_back(receive(peer));
    sends.push_back(send(peer));
  }
  exchange(channel, std::move(receives), std::move(sends), deadline);
}

void Algorithms::send_from_root(int root,
                                const MessageOf& receive,
                                const MessageOf& send,
                                const Deadline& deadline) {
  std::vector<Message> receives;
  std::vector<Message> sends;
  if (rank_ != root) receives.push_back(receive(root));
  for (int peer = 0; rank_ == root && peer < size_; ++peer) {
    if (peer != root) sends.push_back(send(peer));
  }
  exchange(Transport::kData, std::move(receives), std::move(sends), deadline);
}

void Algorithms::send_to_root(int root,
                              const MessageOf& receive,
                              const Message& send,
                              const Deadline& deadline) {
  std::vector<Message> receives;
  std::vector<Message> sends;
  if (rank_ != root) sends.push_back(send);
  for (int peer = 0; rank_ == root && peer < size_; ++peer) {
    if (peer != root) receives.push_back(receive(peer));
  }
  exchange(Transport::kData, std::move(receives), std::move(sends), deadline);
}

Algorithms::Message Algorithms::part(const Bytes& bytes,
                                     int peer,
                                     int of) const {
  return {peer, bytes.data() + bytes.begin(of, size_), bytes.size(of, size_)};
}

void Algorithms::compare(const Fingerprint& own, const Deadline& deadline) {
  std::vector<Fingerprint> all(size_, own);
  const auto exchange_all = [&](const Deadline& end) {
    exchange_with_all(
        Transport::kControl,
        [&](int peer) {
          return Message{peer, &all[peer], sizeof own};
        },
        [&](int peer) {
          return Message{peer, &all[rank_], sizeof own};
        },
        end);
  };
  const auto refuse_leaver = [&] {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_ ||
          all[rank].operation != Operation::kDestroyProcessGroup) {
        continue;
      }
      throw PeerLost("rank " + std::to_string(global_rank_(rank)) +
                         " left before this was complete; every rank must "
                         "make the same calls before destroy_process_group or "
                         "the end of its program",
                     {.peers = {global_rank_(rank)}});
    }
  };
  try {
    exchange_all(deadline);
  } catch (const ExchangeError&) {
    refuse_leaver();  // which may have closed its connections since
    throw;
  }
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const Fingerprint& of_rank) {
        return of_rank != all[0];
      });
  if (other == all.end()) return;
  try {
    exchange_all(Deadline(kFarewellTime));  // until all have seen it
  } catch (const ExchangeError&) {
    // A peer that has seen it may be gone.
  }
  refuse_leaver();
  const int rank = static_cast<int>(other - all.begin());
  throw MismatchError(describe_mismatch(all[0], rank, *other, global_rank_),
                      {.peers = {global_rank_(rank)}});
}

void Algorithms::all_gather(const std::vector<char*>& parts,
                            const Bytes& own,
                            const Deadline& deadline) {
  if (own.data() != parts[rank_]) {
    std::copy_n(own.data(), own.size(), parts[rank_]);
  }
  exchange_with_all(
      Transport::kData,
      [&](int peer) {
        return Message{peer, parts[peer], own.size()};
      },
      [&](int peer) {
        return Message{peer, own.data(), own.size()};
      },
      deadline);
}

void Algorithms::all_gather_parts(const Bytes& bytes,
                                  const Deadline& deadline) {
  exchange_with_all(
      Transport::kData,
      [&](int peer) { return part(bytes, peer, peer); },
      [&](int peer) { return part(bytes, peer, rank_); },
      deadline);
}

void Algorithms::broadcast(const Bytes& bytes,
                           int root,
                           const Deadline& deadline) {
  if (size_ == 2 || bytes.size() <= kDirectBytes) {
    const auto whole = [&](int peer) {
      return Message{peer, bytes.data(), bytes.size()};
    };
    send_from_root(root, whole, whole, deadline);
    return;
  }
  send_from_root(
      root,
      [&](int peer) { return part(bytes, peer, rank_); },
      [&](int peer) { return part(bytes, peer, peer); },
      deadline);
  // Everyone passes its part on, except to the root, which has all.
  const auto unless = [](bool left_out, Message message) {
    if (left_out) message.bytes = 0;
    return message;
  };
  exchange_with_all(
      Transport::kData,
      [&](int peer) { return unless(rank_ == root, part(bytes, peer, peer)); },
      [&](int peer) { return unless(peer == root, part(bytes, peer, rank_)); },
      deadline);
}

void Algorithms::exchange_and_reduce(char* target,
                                     char* own,
                                     size_t bytes,
                                     const Fingerprint& fingerprint,
                                     const MessageOf& send,
                                     const Deadline& deadline) {
  const auto dtype = static_cast<c10::ScalarType>(fingerprint.dtype);
  const at::Tensor received =
      at::empty({static_cast<int64_t>(bytes) * (size_ - 1)}, at::kByte);
  std::vector<const void*> sources(size_, own);
  exchange_with_all(
      Transport::kData,
      [&](int peer) {
        char* const slot = static_cast<char*>(received.data_ptr()) +
                           bytes * (peer < rank_ ? peer : peer - 1);
        sources[peer] = slot;
        return Message{peer, slot, bytes};
      },
      send,
      deadline);
  kernels::reduce(static_cast<ReduceOp>(fingerprint.reduce_op),
                  dtype,
                  target,
                  sources.data(),
                  size_,
                  bytes / c10::elementSize(dtype));
}

void Algorithms::all_reduce(const Bytes& bytes,
                            const Fingerprint& fingerprint,
                            const Deadline& deadline) {
  if (bytes.size() * (size_ - 1) <= kDirectBytes) {
    exchange_and_reduce(
        bytes.data(),
        bytes.data(),
        bytes.size(),
        fingerprint,
        [&](int peer) {
          return Message{peer, bytes.data(), bytes.size()};
        },
        deadline);
    return;
  }
  char* const own = bytes.data() + bytes.begin(rank_, size_);
  exchange_and_reduce(
      own,
      own,
      bytes.size(rank_, size_),
      fingerprint,
      [&](int peer) { return part(bytes, peer, peer); },
      deadline);
  all_gather_parts(bytes, deadline);
}

void Algorithms::reduce_scatter(const std::vector<char*>& parts,
                                const Bytes& output,
                                const Fingerprint& fingerprint,
                                const Deadline& deadline) {
  exchange_and_reduce(
      output.data(),
      parts[rank_],
      output.size(),
      fingerprint,
      [&](int peer) {
        return Message{peer, parts[peer], output.size()};
      },
      deadline);
}

void Algorithms::reduce(const Bytes& bytes,
                        const Fingerprint& fingerprint,
                        const Deadline& deadline) {
  const int root = static_cast<int>(fingerprint.root);
  const auto dtype = static_cast<c10::ScalarType>(fingerprint.dtype);
  const size_t longest = std::min(bytes.size(), kReducedAtOnce);
  at::Tensor received;
  if (rank_ == root) {
    received =
        at::empty({static_cast<int64_t>(longest) * (size_ - 1)}, at::kByte);
  }
  for (size_t start = 0; start < bytes.size(); start += longest) {
    const size_t now = std::min(longest, bytes.size() - start);
    char* const own = bytes.data() + start;
    std::vector<const void*> sources(size_, own);
    send_to_root(
        root,
        [&](int peer) {
          char* const slot = static_cast<char*>(received.data_ptr()) +
                             now * (peer < rank_ ? peer : peer - 1);
          sources[peer] = slot;
          return Message{peer, slot, now};
        },
        Message{root, own, now},
        deadline);
    if (rank_ != root) continue;
    kernels::reduce(static_cast<ReduceOp>(fingerprint.reduce_op),
                    dtype,
                    own,
                    sources.data(),
                    size_,
                    now / c10::elementSize(dtype));
  }
}

void Algorithms::gather(const std::vector<char*>& parts,
                        const Bytes& own,
                        int root,
                        const Deadline& deadline) {
  if (rank_ == root && own.data() != parts[rank_]) {
    std::copy_n(own.data(), own.size(), parts[rank_]);
  }
  send_to_root(
      root,
      [&](int peer) {
        return Message{peer, parts[peer], own.size()};
      },
      Message{root, own.data(), own.size()},
      deadline);
}

void Algorithms::scatter(const std::vector<char*>& parts,
                         const Bytes& own,
                         int root,
                         const Deadline& deadline) {
  if (rank_ == root && own.data() != parts[rank_]) {
    std::copy_n(parts[rank_], own.size(), own.data());
  }
  send_from_root(
      root,
      [&](int peer) {
        return Message{peer, own.data(), own.size()};
      },
      [&](int peer) {
        return Message{peer, parts[peer], own.size()};
      },
      deadline);
}

void Algorithms::all_to_all(const std::vector<Stretch>& sends,
                            const std::vector<Stretch>& receives,
                            size_t element_size,
                            const Deadline& deadline) {
  std::vector<std::vector<uint64_t>> splits(size_, splits_of(sends, receives));
  const size_t bytes = splits[0].size() * sizeof(uint64_t);
  const auto exchange_splits = [&](const Deadline& end) {
    exchange_with_all(
        Transport::kData,
        [&](int peer) {
          return Message{peer, splits[peer].data(), bytes};
        },
        [&](int peer) {
          return Message{peer, splits[rank_].data(), bytes};
        },
        end);
  };
  exchange_splits(deadline);
  const auto verdict = compare_splits(
      size_,
      element_size,
      [&](int rank) { return splits[rank].data(); },
      global_rank_);
  if (verdict.mismatch) {
    try {
      exchange_splits(Deadline(kFarewellTime));  // until all have seen it
    } catch (const ExchangeError&) {
      // A peer that has seen it may be gone.
    }
    throw MismatchError(verdict.mismatch->text,
                        {.peers = {verdict.mismatch->rank}});
  }
  if (sends[rank_].data != receives[rank_].data) {
    std::copy_n(sends[rank_].data, sends[rank_].bytes, receives[rank_].data);
  }
  exchange_with_all(
      Transport::kData,
      [&](int peer) {
        return Message{peer, receives[peer].data, receives[peer].bytes};
      },
      [&](int peer) {
        return Message{peer, sends[peer].data, sends[peer].bytes};
      },
      deadline);
}

}  // namespace lockstep::comm::carried
