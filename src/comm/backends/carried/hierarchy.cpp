#include "comm/backends/carried/hierarchy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/core/error.h"

namespace lockstep::comm::carried {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

at::Tensor as_tensor(char* data, int64_t numel, c10::ScalarType dtype) {
  return at::from_blob(data, {numel}, dtype);
}

c10::ScalarType dtype_of(const Fingerprint& fingerprint) {
  return static_cast<c10::ScalarType>(fingerprint.dtype);
}

c10d::ReduceOp c10d_op(const Fingerprint& fingerprint) {
  return static_cast<c10d::ReduceOp::RedOpType>(fingerprint.reduce_op);
}

bool is_average_of_integers(const Fingerprint& fingerprint) {
  return static_cast<ReduceOp>(fingerprint.reduce_op) == ReduceOp::AVG &&
         c10::isIntegralType(dtype_of(fingerprint), /*includeBool=*/true);
}

std::vector<int> lane_of(const Hosts& hosts, int lane) {
  std::vector<int> ranks;
  for (const auto& host : hosts.ranks) {
    ranks.push_back(host[static_cast<size_t>(lane)]);
  }
  return ranks;
}

}  // namespace

HierarchicalAlgorithms::HierarchicalAlgorithms(
    Transport& transport,
    std::shared_ptr<const Hosts> hosts,
    std::vector<int> members,
    int rank,
    const std::function<bool()>& give_up,
    const GlobalRank& global_rank)
    : Algorithms(transport, std::move(members), rank, give_up, global_rank),
      hosts_(std::move(hosts)),
      own_(place_of(rank)),
      lane_(transport,
            lane_of(*hosts_, own_.lane),
            own_.host,
            give_up,
            global_rank) {
}

HierarchicalAlgorithms::Place HierarchicalAlgorithms::place_of(int rank) const {
  for (size_t host = 0;; ++host) {
    const auto& ranks = hosts_->ranks.at(host);
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found == ranks.end()) continue;
    return {static_cast<int>(host), static_cast<int>(found - ranks.begin())};
  }
}

Tensors HierarchicalAlgorithms::on_host(size_t host,
                                        const std::vector<char*>& parts,
                                        int64_t numel,
                                        c10::ScalarType dtype) const {
  Tensors tensors;
  for (const int rank : hosts_->ranks[host]) {
    tensors.push_back(
        as_tensor(parts[static_cast<size_t>(rank)], numel, dtype));
  }
  return tensors;
}

/// An error becomes that of an exchange with the others of the host: the
/// group's verdict tells more than what was seen inside.
template <class Options, class Start>
void HierarchicalAlgorithms::run_inside(const Deadline& deadline,
                                        Options options,
                                        Start start) const {
  options.timeout = std::max(1ms, deadline.remaining());
  options.asyncOp = false;
  try {
    start(*hosts_->inside, options)->wait();
  } catch (const MismatchError&) {
    throw;
  } catch (const Error& error) {
    auto others = hosts_->ranks[static_cast<size_t>(own_.host)];
    std::erase(others, others[static_cast<size_t>(own_.lane)]);
    throw ExchangeError(error.message(), std::move(others));
  }
}

void HierarchicalAlgorithms::all_reduce(const Bytes& bytes,
                                        const Fingerprint& fingerprint,
                                        const Deadline& deadline) {
  if (is_average_of_integers(fingerprint)) {
    return Algorithms::all_reduce(bytes, fingerprint, deadline);
  }
  const auto numel = static_cast<int64_t>(fingerprint.numel);
  const auto lanes = static_cast<int64_t>(hosts_->ranks.front().size());
  const int64_t shard_numel = (numel + lanes - 1) / lanes;
  const at::Tensor tensor =
      as_tensor(bytes.data(), numel, dtype_of(fingerprint));
  at::Tensor whole = tensor;
  if (shard_numel * lanes != numel) {
    whole = at::zeros({shard_numel * lanes}, tensor.options());
    whole.narrow(0, 0, numel).copy_(tensor);
  }
  at::Tensor shard = at::empty({shard_numel}, tensor.options());
  c10d::ReduceScatterOptions reduction;
  reduction.reduceOp = c10d_op(fingerprint);
  run_inside(deadline, reduction, [&](auto& inside, const auto& options) {
    return inside._reduce_scatter_base(shard, whole, options);
  });
  lane_.all_reduce(Bytes(shard), fingerprint, deadline);
  run_inside(deadline,
             c10d::AllgatherOptions(),
             [&](auto& inside, const auto& options) {
               return inside._allgather_base(whole, shard, options);
             });
  if (!whole.is_same(tensor)) tensor.copy_(whole.narrow(0, 0, numel));
}

void HierarchicalAlgorithms::broadcast(const Bytes& bytes,
                                       int root,
                                       const Deadline& deadline) {
  const Place place = place_of(root);
  if (own_.lane == place.lane) lane_.broadcast(bytes, place.host, deadline);
  Tensors tensors = {
      as_tensor(bytes.data(), static_cast<int64_t>(bytes.size()), at::kByte)};
  c10d::BroadcastOptions from;
  from.rootRank = place.lane;
  run_inside(deadline, from, [&](auto& inside, const auto& options) {
    return inside.broadcast(tensors, options);
  });
}

void HierarchicalAlgorithms::all_gather(const std::vector<char*>& parts,
                                        const Bytes& own,
                                        const Deadline& deadline) {
  std::vector<char*> of_lane;
  for (const int rank : lane_of(*hosts_, own_.lane)) {
    of_lane.push_back(parts[static_cast<size_t>(rank)]);
  }
  lane_.all_gather(of_lane, own, deadline);
  for (size_t host = 0; host < hosts_->ranks.size(); ++host) {
    const auto numel = static_cast<int64_t>(own.size());
    std::vector<Tensors> outputs = {on_host(host, parts, numel, at::kByte)};
    Tensors inputs = {outputs[0][static_cast<size_t>(own_.lane)]};
    run_inside(deadline,
               c10d::AllgatherOptions(),
               [&](auto& inside, const auto& options) {
                 return inside.allgather(outputs, inputs, options);
               });
  }
}

void HierarchicalAlgorithms::reduce_scatter(const std::vector<char*>& parts,
                                            const Bytes& output,
                                            const Fingerprint& fingerprint,
                                            const Deadline& deadline) {
  if (is_average_of_integers(fingerprint)) {
    return Algorithms::reduce_scatter(parts, output, fingerprint, deadline);
  }
  const auto numel = static_cast<int64_t>(fingerprint.numel);
  const auto dtype = dtype_of(fingerprint);
  c10d::ReduceScatterOptions reduction;
  reduction.reduceOp = c10d_op(fingerprint);
  Tensors of_hosts;
  std::vector<char*> for_lane;
  for (size_t host = 0; host < hosts_->ranks.size(); ++host) {
    of_hosts.push_back(at::empty({numel}, dtype));
    for_lane.push_back(Bytes(of_hosts.back()).data());
    Tensors outputs = {of_hosts.back()};
    std::vector<Tensors> inputs = {on_host(host, parts, numel, dtype)};
    run_inside(deadline, reduction, [&](auto& inside, const auto& options) {
      return inside.reduce_scatter(outputs, inputs, options);
    });
  }
  lane_.reduce_scatter(for_lane, output, fingerprint, deadline);
}

void HierarchicalAlgorithms::reduce(const Bytes& bytes,
                                    const Fingerprint& fingerprint,
                                    const Deadline& deadline) {
  if (is_average_of_integers(fingerprint)) {
    return Algorithms::reduce(bytes, fingerprint, deadline);
  }
  const Place root = place_of(static_cast<int>(fingerprint.root));
  const bool in_place = own_.host == root.host || own_.lane != root.lane;
  at::Tensor tensor = as_tensor(bytes.data(),
                                static_cast<int64_t>(fingerprint.numel),
                                dtype_of(fingerprint));
  if (!in_place) tensor = tensor.clone();
  Tensors tensors = {tensor};
  c10d::ReduceOptions reduction;
  reduction.reduceOp = c10d_op(fingerprint);
  reduction.rootRank = root.lane;
  run_inside(deadline, reduction, [&](auto& inside, const auto& options) {
    return inside.reduce(tensors, options);
  });
  if (own_.lane != root.lane) return;
  Fingerprint of_lane = fingerprint;
  of_lane.root = static_cast<uint32_t>(root.host);
  lane_.reduce(Bytes(tensor), of_lane, deadline);
}

}  // namespace lockstep::comm::carried
