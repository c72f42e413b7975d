#include "comm/splits.h"

namespace lockstep::comm {
namespace {

char* data_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

}  // namespace

std::optional<std::string> wrong_splits(const char* name,
                                        const std::vector<int64_t>& splits,
                                        const at::Tensor& tensor,
                                        int ranks) {
  const std::string start = std::string(name) + " ";
  if (tensor.dim() == 0) return start + "need a tensor of rows, not a scalar";
  const auto rows = tensor.size(0);
  if (splits.empty()) {
    if (rows % ranks == 0) return {};
    return start + "are needed: " + std::to_string(rows) +
           " rows do not divide equally among " + std::to_string(ranks) +
           " ranks";
  }
  if (splits.size() != static_cast<size_t>(ranks)) {
    return start + "have " + std::to_string(splits.size()) +
           " numbers; one for each of " + std::to_string(ranks) +
           " ranks is needed";
  }
  if (std::any_of(
          splits.begin(), splits.end(), [](int64_t n) { return n < 0; })) {
    return start + "have a negative number";
  }
  int64_t left = rows;
  for (const int64_t n : splits) {
    if (n > left) {
      return start + "add up to more than the " + std::to_string(rows) +
             " rows of the tensor";
    }
    left -= n;
  }
  if (left > 0) {
    return start + "add up to " + std::to_string(rows - left) +
           "; the tensor has " + std::to_string(rows) + " rows";
  }
  return {};
}

std::vector<Stretch> cut(const at::Tensor& tensor,
                         const std::vector<int64_t>& splits,
                         int ranks) {
  const auto n = static_cast<size_t>(ranks);
  const auto rows = static_cast<size_t>(tensor.size(0));
  std::vector<Stretch> result;
  char* next = data_of(tensor);
  for (size_t r = 0; r < n; ++r) {
    const size_t own_rows =
        splits.empty() ? rows / n : static_cast<size_t>(splits[r]);
    const size_t bytes = rows == 0 ? 0 : tensor.nbytes() / rows * own_rows;
    result.push_back({next, bytes});
    next += bytes;
  }
  return result;
}

std::vector<Stretch> stretches_of_each(const std::vector<at::Tensor>& tensors) {
  std::vector<Stretch> result;
  for (const auto& tensor : tensors) {
    result.push_back({data_of(tensor), tensor.nbytes()});
  }
  return result;
}

std::vector<uint64_t> splits_of(const std::vector<Stretch>& sends,
                                const std::vector<Stretch>& receives) {
  std::vector<uint64_t> splits;
  splits.reserve(sends.size() + receives.size());
  for (const auto& stretch : sends) splits.push_back(stretch.bytes);
  for (const auto& stretch : receives) splits.push_back(stretch.bytes);
  return splits;
}

}  // namespace lockstep::comm
