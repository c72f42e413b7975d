#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "lockstep/core/export.h"

namespace lockstep::checkpoint {

using Tensors = std::map<std::string, at::Tensor>;
using Metadata = std::map<std::string, std::string>;

/// Writes `tensors` to a safetensors file, whole or not at all: into a
/// temporary of the same folder, synced to disk, then renamed. A process killed
/// meanwhile leaves the old file; its temporary goes with the next save of the
/// same path. Missing folders are made. Mirrors
/// `safetensors.torch.save_file`.
///
/// Any dense dtype of the format: F64 F32 F16 BF16 F8_E5M2 F8_E4M3
/// F8_E5M2FNUZ F8_E4M3FNUZ I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64. Any device
/// and strides; tensors that share memory are written once each.
///
/// Blocking. Writing one path from several threads or processes at once is
/// safe: one of them is the last, and its file stays.
///
/// \throws InvalidArgument  a tensor is undefined, sparse or of another dtype,
///     or a name is `__metadata__` or not UTF-8
/// \throws CheckpointError  the file cannot be written; the old one is intact
LOCKSTEP_API void save_file(const Tensors& tensors,
                            const std::string& path,
                            const Metadata& metadata = {});

/// Reads a safetensors file. The tensors are on the CPU and lie in a private
/// mapping of the file that lives as long as the last of them: pages are read
/// when they are used, writing to a tensor leaves the file unchanged. Replacing
/// the file is safe meanwhile, shortening it in place is not. Mirrors
/// `safetensors.torch.load_file`.
///
/// \throws CheckpointError  the file cannot be read, or is malformed: names
///     the file, the tensor and the byte
/// \throws Unsupported  a tensor has a dtype that libtorch or this release
///     lacks
[[nodiscard]] LOCKSTEP_API Tensors load_file(const std::string& path);

/// Reads the `__metadata__` of a safetensors file; empty without one. Throws as
/// `load_file`.
[[nodiscard]] LOCKSTEP_API Metadata load_metadata(const std::string& path);

}  // namespace lockstep::checkpoint
