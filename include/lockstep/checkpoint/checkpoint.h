#pragma once

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/export.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

struct LoadOptions {
  /// Every tensor of the module must be in the file and the reverse.
  bool strict = true;
};

/// Names that did not match; both empty after a strict load.
struct LoadResult {
  std::vector<std::string> missing;     ///< in the module only
  std::vector<std::string> unexpected;  ///< in the file only
};

/// Writes the parameters and buffers of `module` to `path`, under the names
/// that Python's `state_dict()` has for the same structure. The ending chooses
/// the format: `.safetensors`, written as `checkpoint::save_file` describes.
/// Tensors that are one (tied weights) are stored once, and the metadata tells
/// which name stands for which, as with `safetensors.torch.save_model`.
///
/// Blocking; not a collective: call it on one rank.
///
/// \throws InvalidArgument  the ending names no format
/// \throws Unsupported  the format is not supported yet, or the dtype
/// \throws CheckpointError  the file cannot be written; the old one is intact
LOCKSTEP_API void save(const torch::nn::Module& module,
                       const std::string& path);

/// Copies the tensors of a file into the parameters and buffers of `module`,
/// in place and without gradient, converted to their dtype and device. Nothing
/// is copied unless all names and shapes fit. Mirrors
/// `module.load_state_dict(load_file(path))`.
///
/// Blocking; not a collective.
///
/// \throws InvalidArgument, Unsupported  as `save`
/// \throws CheckpointError  the file cannot be read or is malformed; or all
///     names that are missing, unexpected or of another shape
LOCKSTEP_API LoadResult load(torch::nn::Module& module,
                             const std::string& path,
                             const LoadOptions& options = {});

/// The same for what points to a module: a `torch::nn::ModuleHolder`, a
/// `std::shared_ptr`.
/// \throws InvalidArgument when it is empty
template <typename Pointer>
requires requires(const Pointer& pointer, const std::string& path) {
  save(*pointer, path);
}
void save(const Pointer& module, const std::string& path) {
  if (!module) throw InvalidArgument("save: there is no module");
  save(*module, path);
}

/// The same for what points to a module.
/// \throws InvalidArgument when it is empty
template <typename Pointer>
requires requires(Pointer& pointer, const std::string& path) {
  load(*pointer, path);
}
LoadResult load(Pointer&& module,
                const std::string& path,
                const LoadOptions& options = {}) {
  if (!module) throw InvalidArgument("load: there is no module");
  return load(*module, path, options);
}

}  // namespace lockstep
