#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/distributed/collectives.h"

namespace lockstep::comm {

enum class Operation : int32_t {
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  barrier,
  destroy_process_group,
};

/// "all_reduce" and so on, as the free functions are called.
const char* name_of(Operation operation);

/// What must be the same on all ranks of one collective. Trivially copyable:
/// its bytes are what ranks compare.
struct Fingerprint {
  Operation operation = Operation::barrier;
  int32_t dtype = -1;      ///< c10::ScalarType; -1: no tensor
  int32_t reduce_op = -1;  ///< lockstep::ReduceOp; -1: reduces nothing
  int32_t root = -1;       ///< -1: none
  int64_t numel = 0;       ///< of one rank's share

  bool operator==(const Fingerprint&) const = default;
};

/// "all_reduce(SUM, float32, 16 elements)".
std::string describe(const Fingerprint& fingerprint);

/// Where the ranks differ, "rank 0 called ..., rank 2 called ...; ..." with
/// the first rank that differs from rank 0; the same text on every rank.
/// nullopt when all are equal.
std::optional<std::string> mismatch(const std::vector<Fingerprint>& by_rank);

}  // namespace lockstep::comm
