#pragma once

#include <string>

#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::checkpoint {

struct SafetensorsFile {
  Tensors tensors;
  Metadata metadata;
};

/// `load_file` and `load_metadata` in one.
SafetensorsFile read_safetensors(const std::string& path);

}  // namespace lockstep::checkpoint
