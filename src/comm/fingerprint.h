#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "lockstep/distributed/collectives.h"

namespace lockstep::comm {

enum class Operation : uint8_t {
  kBarrier,
  kAllReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kDestroyProcessGroup,
};

/// The operation's name as in PyTorch: "all_reduce".
const char* name(Operation operation) noexcept;

/// What must be equal on all ranks before data is touched. Its bytes are what
/// ranks show each other. Sizes are those of the tensor that every rank has one
/// of; from the sixth on they count only through `numel`.
struct Fingerprint {
  static constexpr size_t kSizes = 5;

  uint64_t numel = 0;
  std::array<int64_t, kSizes> sizes{};
  uint32_t root = 0;
  Operation operation = Operation::kBarrier;
  uint8_t dtype = 0;
  uint8_t reduce_op = 0;
  uint8_t dimensions = 0;

  bool operator==(const Fingerprint&) const = default;
};

/// `tensor` is the one that every rank has one of: what is reduced, broadcast
/// or gathered, or the output of a reduce_scatter or scatter.
Fingerprint fingerprint(Operation operation, const at::Tensor& tensor);
Fingerprint fingerprint(Operation operation,
                        const at::Tensor& tensor,
                        ReduceOp op);
/// Of an all_to_all, in which only the dtype must be equal.
Fingerprint fingerprint_of_all_to_all(c10::ScalarType dtype);

/// The number that errors name a rank of the group by.
using GlobalRank = std::function<int(int rank)>;

/// "all_reduce of Float [4, 2] with SUM".
std::string describe(const Fingerprint& fingerprint,
                     const GlobalRank& global_rank);

/// "the ranks differ: rank 0 called ..., rank 2 called ...", for a
/// MismatchError about a rank that differs from rank 0 of the group.
std::string describe_mismatch(const Fingerprint& of_rank_0,
                              int other_rank,
                              const Fingerprint& of_other,
                              const GlobalRank& global_rank);

}  // namespace lockstep::comm
