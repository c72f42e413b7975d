#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm {

/// Memory that goes to a rank or comes from it.
struct Stretch {
  char* data = nullptr;
  size_t bytes = 0;
};

/// What is wrong with `splits`, the rows of `tensor` that go to or come from
/// each of `ranks` ranks (empty: equally many); nothing when they are right.
/// `name` is what the caller calls them.
std::optional<std::string> wrong_splits(const char* name,
                                        const std::vector<int64_t>& splits,
                                        const at::Tensor& tensor,
                                        int ranks);

/// The contiguous tensor's memory, cut at right splits.
std::vector<Stretch> cut(const at::Tensor& tensor,
                         const std::vector<int64_t>& splits,
                         int ranks);

/// Each tensor's memory.
std::vector<Stretch> stretches_of_each(const std::vector<at::Tensor>& tensors);

/// What a rank tells the others before an all_to_all: the bytes that it sends
/// to each rank, then the bytes that it expects from each.
std::vector<uint64_t> splits_of(const std::vector<Stretch>& sends,
                                const std::vector<Stretch>& receives);

/// What all ranks' splits say together.
struct SplitsVerdict {
  uint64_t longest = 0;  ///< bytes from any rank to any other
  /// Where two ranks do not agree: the same text and rank on all.
  struct Mismatch {
    std::string text;
    int rank;
  };
  std::optional<Mismatch> mismatch;
};

/// `of(rank)` points at what splits_of gave on that rank, of `ranks` ranks;
/// `global_rank(rank)` is the number that the verdict names it by.
template <class Of, class GlobalRank>
SplitsVerdict compare_splits(int ranks,
                             size_t element_size,
                             Of of,
                             GlobalRank global_rank) {
  SplitsVerdict verdict;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      const uint64_t sent = of(from)[to];
      const uint64_t expected = of(to)[ranks + from];
      if (from != to) verdict.longest = std::max(verdict.longest, sent);
      if (sent == expected || verdict.mismatch) continue;
      verdict.mismatch = {
          "the ranks differ: rank " + std::to_string(global_rank(from)) +
              " sends " + std::to_string(sent / element_size) +
              " elements to rank " + std::to_string(global_rank(to)) +
              ", which expects " + std::to_string(expected / element_size) +
              "; they must be equal",
          global_rank(to)};
    }
  }
  return verdict;
}

}  // namespace lockstep::comm
