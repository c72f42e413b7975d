#include "lockstep/distributed/object_collectives.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstring>

#include "core/clock.h"
#include "distributed/call.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"

namespace lockstep {

void Serializer<c10::IValue>::write(ByteWriter& writer,
                                    const c10::IValue& value) {
  const auto bytes = torch::jit::pickle_save(value);
  Serializer<std::string>::write(writer, {bytes.data(), bytes.size()});
}

c10::IValue Serializer<c10::IValue>::read(ByteReader& reader) {
  const auto bytes = Serializer<std::string>::read(reader);
  try {
    return torch::jit::pickle_load({bytes.begin(), bytes.end()});
  } catch (const c10::Error& error) {
    throw InvalidArgument(std::string("an object cannot be read: ") +
                          error.what_without_backtrace());
  }
}

void Serializer<at::Tensor>::write(ByteWriter& writer,
                                   const at::Tensor& value) {
  Serializer<c10::IValue>::write(
      writer, value.defined() ? value.detach().cpu().clone() : value);
}

at::Tensor Serializer<at::Tensor>::read(ByteReader& reader) {
  const auto value = Serializer<c10::IValue>::read(reader);
  if (!value.isTensor()) {
    throw InvalidArgument("an object is " + value.tagKind() + ", not a tensor");
  }
  return value.toTensor();
}

namespace detail {
namespace {

using distributed::Call;
using Parts = std::vector<std::string>;
using Timeout = std::optional<std::chrono::milliseconds>;

/// The bound of an operation of several collectives.
class Bound {
 public:
  explicit Bound(Timeout timeout) : timeout_(timeout) {
    if (timeout) deadline_.emplace(*timeout);
  }
  /// What is left of it; a wrong one as it is, to be refused.
  [[nodiscard]] Timeout left() const {
    if (!timeout_ || timeout_->count() <= 0) return timeout_;
    return std::max(deadline_->remaining(), std::chrono::milliseconds(1));
  }

 private:
  Timeout timeout_;
  std::optional<Deadline> deadline_;
};

/// Borrows the bytes; nobody writes to it.
at::Tensor as_tensor(const std::string& bytes) {
  return at::from_blob(const_cast<char*>(bytes.data()),
                       {static_cast<int64_t>(bytes.size())},
                       at::kByte);
}

std::string to_string(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

at::Tensor size_of(const std::string& bytes) {
  return at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong);
}

std::vector<int64_t> values_of(const at::Tensor& sizes) {
  const auto* first = sizes.const_data_ptr<int64_t>();
  return {first, first + sizes.numel()};
}

/// Bytes of any number from each rank to each; their sizes go first.
class Exchange {
 public:
  Exchange(const Call& call, ProcessGroup group, Timeout timeout)
      : ranks_(static_cast<size_t>(call.group().world_size)),
        group_(std::move(group)),
        bound_(timeout) {}

  [[nodiscard]] size_t ranks() const { return ranks_; }

  /// What every rank has, in rank order.
  [[nodiscard]] std::vector<int64_t> all_sizes(const std::string& own) const {
    auto sizes = at::empty(static_cast<int64_t>(ranks_), at::kLong);
    all_gather_into_tensor(
        sizes, size_of(own), {.group = group_, .timeout = bound_.left()});
    return values_of(sizes);
  }

  /// What the others send to this rank, together.
  [[nodiscard]] int64_t own_size(const Parts& sends) const {
    auto sizes = at::empty(static_cast<int64_t>(ranks_), at::kLong);
    for (size_t r = 0; r < ranks_; ++r) {
      sizes[static_cast<int64_t>(r)] = static_cast<int64_t>(sends[r].size());
    }
    auto own = at::empty(1, at::kLong);
    reduce_scatter_tensor(
        own, sizes, {.group = group_, .timeout = bound_.left()});
    return own.item<int64_t>();
  }

  [[nodiscard]] Parts run(const Parts& sends,
                          const std::vector<int64_t>& sizes) const {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    for (const auto& bytes : sends) inputs.push_back(as_tensor(bytes));
    for (const int64_t n : sizes) outputs.push_back(at::empty(n, at::kByte));
    all_to_all(outputs, inputs, {.group = group_, .timeout = bound_.left()});
    Parts received;
    for (const auto& bytes : outputs) received.push_back(to_string(bytes));
    return received;
  }

 private:
  size_t ranks_;
  ProcessGroup group_;
  Bound bound_;
};

}  // namespace

std::vector<std::string> all_gather_bytes(
    const std::string& own, const AllGatherObjectOptions& options) {
  const Call call("all_gather_object", options.group, options.timeout, false);
  if (!call.is_member()) return {};
  const Exchange exchange(call, options.group, options.timeout);
  return exchange.run(Parts(exchange.ranks(), own), exchange.all_sizes(own));
}

std::vector<std::string> gather_bytes(const std::string& own,
                                      const GatherObjectOptions& options) {
  const Call call("gather_object", options.group, options.timeout, false);
  if (!call.is_member()) return {};
  const int dst = call.group_rank("dst", options.dst, options.group_dst);
  const Exchange exchange(call, options.group, options.timeout);
  auto sizes = exchange.all_sizes(own);
  const bool is_destination = call.group().rank == dst;
  if (!is_destination) sizes.assign(exchange.ranks(), 0);
  Parts sends(exchange.ranks());
  sends[static_cast<size_t>(dst)] = own;
  auto parts = exchange.run(sends, sizes);
  return is_destination ? parts : Parts();
}

std::optional<std::string> broadcast_bytes(
    const std::function<std::string()>& own,
    const BroadcastObjectListOptions& options) {
  const Call call(
      "broadcast_object_list", options.group, options.timeout, false);
  if (!call.is_member()) return {};
  const int src = call.group_rank("src", options.src, options.group_src);
  const bool is_source = call.group().rank == src;
  const std::string bytes = is_source ? own() : std::string();
  const Bound bound(options.timeout);
  const auto send = [&](at::Tensor& tensor) {
    broadcast(
        tensor,
        {.group = options.group, .timeout = bound.left(), .group_src = src});
  };
  auto size = size_of(bytes);
  send(size);
  auto data =
      is_source ? as_tensor(bytes) : at::empty(size.item<int64_t>(), at::kByte);
  send(data);
  if (is_source) return {};
  return to_string(data);
}

std::optional<std::string> scatter_bytes(
    const std::vector<std::string>& parts,
    const ScatterObjectListOptions& options) {
  const Call call("scatter_object_list", options.group, options.timeout, false);
  if (!call.is_member()) return {};
  const int src = call.group_rank("src", options.src, options.group_src);
  const Exchange exchange(call, options.group, options.timeout);
  const bool is_source = call.group().rank == src;
  if (is_source && parts.size() != exchange.ranks()) {
    call.fail("scatter_object_input_list holds " +
              std::to_string(parts.size()) +
              " objects; one per rank is needed, " +
              std::to_string(exchange.ranks()));
  }
  Parts sends(exchange.ranks());
  if (is_source) sends = parts;
  std::vector<int64_t> sizes(exchange.ranks());
  sizes[static_cast<size_t>(src)] = exchange.own_size(sends);
  return exchange.run(sends, sizes)[static_cast<size_t>(src)];
}

}  // namespace detail
}  // namespace lockstep
