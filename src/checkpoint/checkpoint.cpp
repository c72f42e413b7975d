#include "lockstep/checkpoint/checkpoint.h"

#include <torch/nn/module.h>

#include <filesystem>
#include <set>

#include "checkpoint/safetensors_file.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using checkpoint::Metadata;
using checkpoint::Tensors;

/// The ending decides the format.
void check_format(const std::string& path) {
  const auto ending = std::filesystem::path(path).extension().string();
  if (ending == ".safetensors") return;
  if (ending == ".pt" || ending == ".pth" || ending == ".bin") {
    throw Unsupported("\"" + path + "\": PyTorch's own format (" + ending +
                      ") is not supported yet; use a name that ends in "
                      ".safetensors, which Python reads with "
                      "safetensors.torch.load_file");
  }
  throw InvalidArgument("\"" + path +
                        "\": the ending names no format; use .safetensors");
}

Tensors state_of(const torch::nn::Module& module) {
  Tensors state;
  for (const auto& item : module.named_parameters()) {
    state[item.key()] = item.value();
  }
  for (const auto& item : module.named_buffers()) {
    state[item.key()] = item.value();
  }
  return state;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() > 0 && a.const_data_ptr() == b.const_data_ptr() &&
         a.device() == b.device() && a.dtype() == b.dtype() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

/// For each tensor that is the same as one before it: the first one's name.
std::map<std::string, std::string> tied_names(const Tensors& state) {
  std::map<std::string, std::string> tied;
  std::unordered_multimap<const void*, const std::string*> first;
  for (const auto& [name, tensor] : state) {
    if (!tensor.has_storage()) continue;
    const auto [begin, end] = first.equal_range(tensor.const_data_ptr());
    const auto twin = std::find_if(begin, end, [&](const auto& item) {
      return same_memory(state.at(*item.second), tensor);
    });
    if (twin != end) {
      tied[name] = *twin->second;
    } else {
      first.emplace(tensor.const_data_ptr(), &name);
    }
  }
  return tied;
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) {
    text += (text.empty() ? "\"" : ", \"") + name + '"';
  }
  return text;
}

std::string shape_text(const at::Tensor& tensor) {
  std::string text;
  for (const auto size : tensor.sizes()) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return '[' + text + ']';
}

}  // namespace

void save(const torch::nn::Module& module, const std::string& path) {
  check_format(path);
  auto state = state_of(module);
  auto metadata = tied_names(state);
  for (const auto& [name, kept] : metadata) state.erase(name);
  metadata.emplace("format", "pt");
  checkpoint::save_file(state, path, metadata);
}

LoadResult load(torch::nn::Module& module,
                const std::string& path,
                const LoadOptions& options) {
  check_format(path);
  auto state = state_of(module);
  const auto file = checkpoint::read_safetensors(path);
  const auto tied = tied_names(state);

  std::map<std::string, at::Tensor> sources;
  std::set<std::string> used;
  for (const auto& [name, tensor] : state) {
    auto found = file.tensors.find(name);
    if (found == file.tensors.end()) {
      if (const auto alias = file.metadata.find(name);
          alias != file.metadata.end()) {
        found = file.tensors.find(alias->second);
      }
    }
    if (found == file.tensors.end()) continue;
    sources[name] = found->second;
    used.insert(found->first);
  }

  // A tied tensor is there when one of its names is.
  const auto first_name = [&](const std::string& name) -> const std::string& {
    const auto found = tied.find(name);
    return found == tied.end() ? name : found->second;
  };
  std::set<std::string> filled;
  for (const auto& [name, source] : sources) filled.insert(first_name(name));

  LoadResult result;
  std::string shapes;
  for (const auto& [name, tensor] : state) {
    const auto source = sources.find(name);
    if (source == sources.end()) {
      if (!filled.contains(first_name(name))) result.missing.push_back(name);
    } else if (source->second.sizes() != tensor.sizes()) {
      shapes += (shapes.empty() ? "\"" : ", \"") + name + "\" (" +
                shape_text(source->second) + " in the file, " +
                shape_text(tensor) + " in the module)";
    }
  }
  for (const auto& [name, tensor] : file.tensors) {
    if (!used.contains(name)) result.unexpected.push_back(name);
  }

  std::string problems;
  if (options.strict && !result.missing.empty()) {
    problems += "; missing in the file: " + quoted_list(result.missing);
  }
  if (options.strict && !result.unexpected.empty()) {
    problems += "; not in the module: " + quoted_list(result.unexpected);
  }
  if (!shapes.empty()) problems += "; of another shape: " + shapes;
  if (!problems.empty()) {
    throw CheckpointError("\"" + path + "\" does not fit the module" +
                          problems);
  }

  const at::NoGradGuard no_grad;
  for (const auto& [name, source] : sources) state.at(name).copy_(source);
  return result;
}

}  // namespace lockstep
