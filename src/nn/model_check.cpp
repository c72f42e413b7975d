#include "nn/model_check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep::nn {
namespace {

/// One line per tensor: `"fc.weight": float32 [10, 5], strides [5, 1]`.
std::string describe(const std::vector<NamedTensor>& tensors,
                     const char* kind) {
  std::ostringstream text;
  for (const auto& [name, tensor] : tensors) {
    text << kind << " \"" << name << "\" (" << tensor.scalar_type() << ' '
         << tensor.sizes();
    if (!tensor.is_contiguous()) text << ", strides " << tensor.strides();
    text << ", " << c10::DeviceTypeName(tensor.device().type(), true);
    if (tensor.requires_grad()) text << ", requires_grad";
    text << ")\n";
  }
  return text.str();
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

std::vector<std::string> gather_texts(const std::string& own,
                                      size_t longest,
                                      const ProcessGroup& group) {
  const int64_t width = static_cast<int64_t>(longest);
  auto input = at::zeros({width}, at::kByte);
  std::memcpy(input.data_ptr(), own.data(), own.size());
  auto output = at::empty({group.size() * width}, at::kByte);
  all_gather_into_tensor(output, input, {.group = group});
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const char* begin = static_cast<const char*>(output.data_ptr()) +
                        static_cast<size_t>(rank) * longest;
    texts.emplace_back(begin, strnlen(begin, longest));
  }
  return texts;
}

}  // namespace

void check_same_model(const std::vector<NamedTensor>& parameters,
                      const std::vector<NamedTensor>& buffers,
                      const std::shared_ptr<distributed::Group>& group) {
  const ProcessGroup handle(group);
  const std::string own =
      describe(parameters, "parameter") + describe(buffers, "buffer");
  auto summary = at::empty({2}, at::kLong);
  summary[0] = static_cast<int64_t>(own.size());
  summary[1] = static_cast<int64_t>(std::hash<std::string>{}(own));
  auto summaries = at::empty({group->world_size * 2}, at::kLong);
  all_gather_into_tensor(summaries, summary, {.group = handle});
  summaries = summaries.view({-1, 2});
  if (summaries.eq(summary).all().item<bool>()) return;

  const auto longest = summaries.select(1, 0).max().item<int64_t>();
  const auto texts = gather_texts(own, static_cast<size_t>(longest), handle);
  const auto reference = lines(texts[0]);
  std::vector<std::vector<std::string>> models;
  for (const auto& text : texts) models.push_back(lines(text));
  const auto entry = [](const std::vector<std::string>& model, size_t i) {
    return i < model.size() ? model[i] : std::string("nothing more");
  };
  for (size_t i = 0;; ++i) {
    for (size_t rank = 1; rank < models.size(); ++rank) {
      if (entry(models[rank], i) == entry(reference, i)) continue;
      auto context = group->context("DistributedDataParallel");
      context.peers = {group->ranks[rank]};
      throw MismatchError(
          "the ranks' models differ, first at entry " + std::to_string(i) +
              ": rank " + std::to_string(group->ranks[0]) + " has " +
              entry(reference, i) + ", rank " +
              std::to_string(group->ranks[rank]) + " has " +
              entry(models[rank], i) + "; build the same model on every rank",
          std::move(context));
    }
  }
}

}  // namespace lockstep::nn
