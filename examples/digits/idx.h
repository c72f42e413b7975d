#pragma once

#include <torch/types.h>

#include <string>

/// Reads a file of unsigned bytes in the IDX format, in which MNIST is
/// distributed. Returns a uint8 tensor of the shape that the file names.
/// \throws std::runtime_error when the file cannot be read or is malformed
torch::Tensor read_idx(const std::string& path);
