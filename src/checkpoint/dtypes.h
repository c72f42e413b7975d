#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace lockstep::checkpoint {

/// The dtype of a safetensors name ("F32"); none when libtorch lacks it.
std::optional<c10::ScalarType> dtype_of(std::string_view name);

/// The safetensors name of a dtype; empty when the format lacks it.
std::string_view name_of(c10::ScalarType dtype);

}  // namespace lockstep::checkpoint
