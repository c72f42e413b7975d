#include "comm/fingerprint.h"

#include <algorithm>

namespace lockstep::comm {
namespace {

const char* name(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::SUM:
      return "SUM";
    case ReduceOp::AVG:
      return "AVG";
    case ReduceOp::PRODUCT:
      return "PRODUCT";
    case ReduceOp::MIN:
      return "MIN";
    case ReduceOp::MAX:
      return "MAX";
  }
  return "?";
}

std::string describe_shape(const Fingerprint& fingerprint) {
  std::string text = "[";
  for (size_t i = 0; i < fingerprint.dimensions; ++i) {
    if (i > 0) text += ", ";
    if (i == Fingerprint::kSizes) {
      text += "...] of " + std::to_string(fingerprint.numel) + " elements";
      return text;
    }
    text += std::to_string(fingerprint.sizes[i]);
  }
  return text + ']';
}

}  // namespace

const char* name(Operation operation) noexcept {
  switch (operation) {
    case Operation::kBarrier:
      return "barrier";
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kReduce:
      return "reduce";
    case Operation::kGather:
      return "gather";
    case Operation::kScatter:
      return "scatter";
    case Operation::kAllToAll:
      return "all_to_all";
    case Operation::kDestroyProcessGroup:
      return "destroy_process_group";
  }
  return "?";
}

Fingerprint fingerprint(Operation operation, const at::Tensor& tensor) {
  Fingerprint result;
  result.numel = static_cast<uint64_t>(tensor.numel());
  const auto sizes = tensor.sizes();
  std::copy_n(sizes.begin(),
              std::min(sizes.size(), Fingerprint::kSizes),
              result.sizes.begin());
  result.operation = operation;
  result.dtype = static_cast<uint8_t>(tensor.scalar_type());
  result.dimensions = static_cast<uint8_t>(sizes.size());
  return result;
}

Fingerprint fingerprint(Operation operation,
                        const at::Tensor& tensor,
                        ReduceOp op) {
  auto result = fingerprint(operation, tensor);
  result.reduce_op = static_cast<uint8_t>(op);
  return result;
}

Fingerprint fingerprint_of_all_to_all(c10::ScalarType dtype) {
  Fingerprint result;
  result.operation = Operation::kAllToAll;
  result.dtype = static_cast<uint8_t>(dtype);
  return result;
}

std::string describe(const Fingerprint& fingerprint,
                     const GlobalRank& global_rank) {
  const auto root = [&] {
    return std::to_string(global_rank(static_cast<int>(fingerprint.root)));
  };
  std::string text = name(fingerprint.operation);
  if (fingerprint.operation == Operation::kBarrier ||
      fingerprint.operation == Operation::kDestroyProcessGroup) {
    return text;
  }
  text += " of ";
  text += c10::toString(static_cast<c10::ScalarType>(fingerprint.dtype));
  if (fingerprint.operation == Operation::kAllToAll) return text;
  text += ' ' + describe_shape(fingerprint);
  if (fingerprint.operation == Operation::kAllReduce ||
      fingerprint.operation == Operation::kReduceScatter ||
      fingerprint.operation == Operation::kReduce) {
    text += " with ";
    text += name(static_cast<ReduceOp>(fingerprint.reduce_op));
  }
  if (fingerprint.operation == Operation::kBroadcast ||
      fingerprint.operation == Operation::kScatter) {
    text += " from rank " + root();
  }
  if (fingerprint.operation == Operation::kReduce ||
      fingerprint.operation == Operation::kGather) {
    text += " to rank " + root();
  }
  return text;
}

std::string describe_mismatch(const Fingerprint& of_rank_0,
                              int other_rank,
                              const Fingerprint& of_other,
                              const GlobalRank& global_rank) {
  const auto calls = [&](int rank, const Fingerprint& fingerprint) {
    return "rank " + std::to_string(global_rank(rank)) + " called " +
           describe(fingerprint, global_rank);
  };
  return "the ranks differ: " + calls(0, of_rank_0) + ", " +
         calls(other_rank, of_other) +
         "; all ranks must make the same calls in the same order";
}

}  // namespace lockstep::comm
