#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace lockstep::data {

/// Python's `torch.empty((), dtype=torch.int64).random_(generator=g).item()`;
/// unset: libtorch's default generator.
int64_t draw_seed(const std::optional<at::Generator>& generator);

}  // namespace lockstep::data
