#include "comm/fingerprint.h"

namespace lockstep::comm {
namespace {

const char* name_of(ReduceOp op) {
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
  return "an unknown reduction";
}

}  // namespace

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::broadcast:
      return "broadcast";
    case Operation::all_gather:
      return "all_gather";
    case Operation::reduce_scatter:
      return "reduce_scatter";
    case Operation::barrier:
      return "barrier";
    case Operation::destroy_process_group:
      return "destroy_process_group";
  }
  return "an unknown operation";
}

std::string describe(const Fingerprint& f) {
  std::string text = name_of(f.operation);
  if (f.dtype < 0) return text;
  text += '(';
  if (f.reduce_op >= 0) {
    text += name_of(static_cast<ReduceOp>(f.reduce_op));
    text += ", ";
  }
  if (f.root >= 0) text += "src " + std::to_string(f.root) + ", ";
  text += c10::getDtypeNames(static_cast<c10::ScalarType>(f.dtype)).first;
  text += ", " + std::to_string(f.numel) +
          (f.numel == 1 ? " element)" : " elements)");
  return text;
}

std::optional<std::string> mismatch(const std::vector<Fingerprint>& by_rank) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] == by_rank[0]) continue;
    return "rank 0 called " + describe(by_rank[0]) + ", rank " +
           std::to_string(rank) + " called " + describe(by_rank[rank]) +
           "; all ranks must make the same calls in the same order with the "
           "same dtype and number of elements";
  }
  return std::nullopt;
}

}  // namespace lockstep::comm
