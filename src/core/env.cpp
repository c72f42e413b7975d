#include "core/env.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>

#include "lockstep/core/error.h"

namespace lockstep::env {

std::optional<std::string> get(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<int64_t> get_int(const char* name,
                               int64_t minimum,
                               int64_t maximum) {
  const auto value = get(name);
  if (!value) return std::nullopt;
  int64_t number = 0;
  const char* end = value->data() + value->size();
  const auto [stop, error] = std::from_chars(value->data(), end, number);
  if (error != std::errc() || stop != end || number < minimum ||
      number > maximum) {
    throw InvalidArgument(std::string(name) + "=\"" + *value +
                          "\" is not a whole number from " +
                          std::to_string(minimum) + " to " +
                          std::to_string(maximum) + "; set it to one");
  }
  return number;
}

std::optional<bool> get_bool(const char* name) {
  auto value = get(name);
  if (!value) return std::nullopt;
  std::transform(value->begin(), value->end(), value->begin(), [](char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  });
  for (const char* yes : {"1", "true", "yes", "on"}) {
    if (*value == yes) return true;
  }
  for (const char* no : {"0", "false", "no", "off"}) {
    if (*value == no) return false;
  }
  throw InvalidArgument(std::string(name) + "=\"" + *value +
                        "\" is neither 1 nor 0; set it to one of them");
}

}  // namespace lockstep::env
