#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::checkpoint {

/// One tensor of a safetensors file.
struct TensorEntry {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
  size_t begin;  ///< first byte, counted from the start of the data
  size_t end;    ///< one past the last byte
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< in the order of their data
  Metadata metadata;
};

/// Reads the header of a whole file and checks all of it: sizes, names, dtypes,
/// and that the tensors cover the data without gap or overlap. Sets `data` to
/// what follows it. `path` is for messages.
/// \throws CheckpointError, Unsupported
SafetensorsHeader parse_header(std::span<std::byte> file,
                               const std::string& path,
                               std::span<std::byte>& data);

/// The header with its length before it, padded so that data begins at a
/// multiple of 8 bytes.
/// \throws InvalidArgument for a name or metadata that is not UTF-8
std::string format_header(const SafetensorsHeader& header);

}  // namespace lockstep::checkpoint
