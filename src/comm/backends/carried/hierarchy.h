#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backends/carried/algorithms.h"

namespace lockstep::comm::carried {

/// Hosts with the same number of ranks each.
struct Hosts {
  std::vector<std::vector<int>> ranks;  ///< of the group, by host
  /// Between the ranks of the own host, in that order.
  c10::intrusive_ptr<c10d::Backend> inside;
};

/// Collectives in which as little as possible leaves a host: ranks reduce and
/// gather inside it, and exchange with the ranks of the same number on the
/// other hosts, their lane, all lanes at the same time. Of an all_reduce of N
/// bytes between two hosts N leave each of them; flat with L ranks per host it
/// would be L times as many. What has nothing to gain, and averages of
/// integers, whose rounding depends on all summands, go the flat way.
///
/// half and bfloat16 are rounded once inside the host and once between hosts.
class HierarchicalAlgorithms final : public Algorithms {
 public:
  /// `members`: all ranks of the transport, ascending.
  HierarchicalAlgorithms(Transport& transport,
                         std::shared_ptr<const Hosts> hosts,
                         std::vector<int> members,
                         int rank,
                         const std::function<bool()>& give_up,
                         const GlobalRank& global_rank);
  ~HierarchicalAlgorithms() override { hosts_->inside->shutdown(); }

  void all_reduce(const Bytes& bytes,
                  const Fingerprint& fingerprint,
                  const Deadline& deadline) override;
  void broadcast(const Bytes& bytes,
                 int root,
                 const Deadline& deadline) override;
  void all_gather(const std::vector<char*>& parts,
                  const Bytes& own,
                  const Deadline& deadline) override;
  void reduce_scatter(const std::vector<char*>& parts,
                      const Bytes& output,
                      const Fingerprint& fingerprint,
                      const Deadline& deadline) override;
  void reduce(const Bytes& bytes,
              const Fingerprint& fingerprint,
              const Deadline& deadline) override;

 private:
  /// A rank's host and its number there.
  struct Place {
    int host;
    int lane;
  };

  [[nodiscard]] Place place_of(int rank) const;
  /// `parts` of the ranks of one host.
  [[nodiscard]] std::vector<at::Tensor> on_host(size_t host,
                                                const std::vector<char*>& parts,
                                                int64_t numel,
                                                c10::ScalarType dtype) const;
  template <class Options, class Start>
  void run_inside(const Deadline& deadline, Options options, Start start) const;

  const std::shared_ptr<const Hosts> hosts_;
  const Place own_;
  Algorithms lane_;
};

}  // namespace lockstep::comm::carried
