#include "checkpoint/dtypes.h"

#include <array>

namespace lockstep::checkpoint {
namespace {

struct Entry {
  std::string_view name;
  c10::ScalarType dtype;
};

constexpr std::array kDtypes = {
    Entry{"F64", c10::ScalarType::Double},
    Entry{"F32", c10::ScalarType::Float},
    Entry{"F16", c10::ScalarType::Half},
    Entry{"BF16", c10::ScalarType::BFloat16},
    Entry{"F8_E5M2", c10::ScalarType::Float8_e5m2},
    Entry{"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    Entry{"F8_E5M2FNUZ", c10::ScalarType::Float8_e5m2fnuz},
    Entry{"F8_E4M3FNUZ", c10::ScalarType::Float8_e4m3fnuz},
    Entry{"F8_E8M0", c10::ScalarType::Float8_e8m0fnu},
    Entry{"I64", c10::ScalarType::Long},
    Entry{"I32", c10::ScalarType::Int},
    Entry{"I16", c10::ScalarType::Short},
    Entry{"I8", c10::ScalarType::Char},
    Entry{"U64", c10::ScalarType::UInt64},
    Entry{"U32", c10::ScalarType::UInt32},
    Entry{"U16", c10::ScalarType::UInt16},
    Entry{"U8", c10::ScalarType::Byte},
    Entry{"BOOL", c10::ScalarType::Bool},
    Entry{"C64", c10::ScalarType::ComplexFloat},
};

}  // namespace

std::optional<c10::ScalarType> dtype_of(std::string_view name) {
  for (const auto& entry : kDtypes) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

std::string_view name_of(c10::ScalarType dtype) {
  for (const auto& entry : kDtypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return {};
}

}  // namespace lockstep::checkpoint
