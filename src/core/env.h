#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::env {

/// The variable's value; empty and unset are the same: `nullopt`.
std::optional<std::string> get(const char* name);

/// A whole decimal number in [minimum, maximum]. Throws InvalidArgument that
/// names the variable, its value and the range.
std::optional<int64_t> get_int(const char* name,
                               int64_t minimum = INT64_MIN,
                               int64_t maximum = INT64_MAX);

/// 1/true/yes/on or 0/false/no/off in any case; anything else throws
/// InvalidArgument that names the variable.
std::optional<bool> get_bool(const char* name);

}  // namespace lockstep::env
