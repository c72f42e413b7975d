#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "comm/backends/carried/transport.h"
#include "comm/fingerprint.h"
#include "comm/splits.h"
#include "core/clock.h"

namespace lockstep::comm::carried {

/// How long a rank that is done waits for the others before it closes its
/// connections: what it sent may still be under way to them.
inline constexpr std::chrono::seconds kFarewellTime(1);

/// A contiguous tensor as bytes, cut into one range of elements per rank.
class Bytes {
 public:
  explicit Bytes(const at::Tensor& tensor)
      : data_(static_cast<char*>(tensor.data_ptr())),
        item_(tensor.element_size()),
        numel_(tensor.numel()) {}

  [[nodiscard]] char* data() const { return data_; }
  [[nodiscard]] size_t size() const { return numel_ * item_; }
  [[nodiscard]] size_t begin(int part, int parts) const {
    return numel_ * part / parts * item_;
  }
  [[nodiscard]] size_t size(int part, int parts) const {
    return begin(part + 1, parts) - begin(part, parts);
  }

 private:
  char* data_;
  size_t item_;
  size_t numel_;
};

/// The collectives as exchanges of messages. Every member blocks until this
/// rank's part is done and throws ExchangeError when it cannot be.
class Algorithms {
 public:
  /// `members`: the transport's ranks that take part; the members number them
  /// from 0, and `rank` is the own number. `give_up`: see Transport::exchange.
  /// `global_rank`: how errors name the transport's ranks.
  Algorithms(Transport& transport,
             std::vector<int> members,
             int rank,
             std::function<bool()> give_up,
             GlobalRank global_rank)
      : transport_(transport),
        members_(std::move(members)),
        rank_(rank),
        size_(static_cast<int>(members_.size())),
        give_up_(std::move(give_up)),
        global_rank_([this, name = std::move(global_rank)](int member) {
          return name(members_[static_cast<size_t>(member)]);
        }) {}
  Algorithms(const Algorithms&) = delete;
  Algorithms& operator=(const Algorithms&) = delete;
  virtual ~Algorithms() = default;

  /// A barrier; throws MismatchError on every rank when they differ, PeerLost
  /// when one is about to leave.
  void compare(const Fingerprint& own, const Deadline& deadline);

  virtual void all_reduce(const Bytes& bytes,
                          const Fingerprint& fingerprint,
                          const Deadline& deadline);
  virtual void broadcast(const Bytes& bytes,
                         int root,
                         const Deadline& deadline);
  /// `parts[r]` takes rank r's `own`.
  virtual void all_gather(const std::vector<char*>& parts,
                          const Bytes& own,
                          const Deadline& deadline);
  /// `parts[r]` goes to rank r.
  virtual void reduce_scatter(const std::vector<char*>& parts,
                              const Bytes& output,
                              const Fingerprint& fingerprint,
                              const Deadline& deadline);
  /// At the root in place; the others' bytes are read only.
  virtual void reduce(const Bytes& bytes,
                      const Fingerprint& fingerprint,
                      const Deadline& deadline);
  /// At the root `parts[r]` takes rank r's `own`; elsewhere there are none.
  void gather(const std::vector<char*>& parts,
              const Bytes& own,
              int root,
              const Deadline& deadline);
  /// `own` takes the root's `parts[rank]`; elsewhere there are none.
  void scatter(const std::vector<char*>& parts,
               const Bytes& own,
               int root,
               const Deadline& deadline);
  /// `sends[r]` arrives in rank r's `receives[rank]`. Throws MismatchError on
  /// every rank where the lengths differ.
  void all_to_all(const std::vector<Stretch>& sends,
                  const std::vector<Stretch>& receives,
                  size_t element_size,
                  const Deadline& deadline);

 private:
  using Message = Transport::Message;
  using MessageOf = std::function<Message(int peer)>;

  void exchange(Transport::Channel channel,
                std::vector<Message> receives,
                std::vector<Message> sends,
                const Deadline& deadline);
  void exchange_with_all(Transport::Channel channel,
                         const MessageOf& receive,
                         const MessageOf& send,
                         const Deadline& deadline);
  void exchange_and_reduce(char* target,
                           char* own,
                           size_t bytes,
                           const Fingerprint& fingerprint,
                           const MessageOf& send,
                           const Deadline& deadline);
  void all_gather_parts(const Bytes& bytes, const Deadline& deadline);
  void send_from_root(int root,
                      const MessageOf& receive,
                      const MessageOf& send,
                      const Deadline& deadline);
  void send_to_root(int root,
                    const MessageOf& receive,
                    const Message& send,
                    const Deadline& deadline);
  [[nodiscard]] Message part(const Bytes& bytes, int peer, int of) const;

  Transport& transport_;
  const std::vector<int> members_;
  const int rank_;
  const int size_;
  const std::function<bool()> give_up_;
  const GlobalRank global_rank_;
};

}  // namespace lockstep::comm::carried
