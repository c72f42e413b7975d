#include "checkpoint/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/dtypes.h"
#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

using nlohmann::json;

constexpr size_t kLengthBytes = sizeof(uint64_t);
constexpr uint64_t kLargestHeader = 100'000'000;  // as in the Python package
constexpr int kDeepestNesting = 8;
constexpr size_t kMostDimensions = 64;
constexpr auto kMetadataName = "__metadata__";

class Parser {
 public:
  Parser(std::span<std::byte> file, const std::string& path)
      : file_(file), path_(path) {}

  SafetensorsHeader parse(std::span<std::byte>& data) {
    const auto text = header_text();
    data = file_.subspan(kLengthBytes + text.size());
    const auto root = parse_json(text);
    SafetensorsHeader header;
    for (const auto& [name, value] : root.items()) {
      if (name == kMetadataName) {
        header.metadata = parse_metadata(value);
      } else {
        header.tensors.push_back(parse_entry(name, value));
      }
    }
    check_coverage(header.tensors, data.size());
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw CheckpointError("\"" + path_ +
                          "\" is not a valid safetensors file: " + what);
  }
  [[noreturn]] void fail(const std::string& tensor,
                         const std::string& what) const {
    fail("tensor \"" + tensor + "\": " + what);
  }

  std::string_view header_text() const {
    if (file_.size() < kLengthBytes) {
      fail("it ends at byte " + std::to_string(file_.size()) +
           ", within the length of the header");
    }
    uint64_t length = 0;
    std::memcpy(&length, file_.data(), kLengthBytes);
    if (length > kLargestHeader) {
      fail("the header claims " + std::to_string(length) +
           " bytes; the format allows " + std::to_string(kLargestHeader));
    }
    if (length > file_.size() - kLengthBytes) {
      fail("it ends at byte " + std::to_string(file_.size()) +
           ", but the header extends to byte " +
           std::to_string(kLengthBytes + length));
    }
    const std::string_view text(
        reinterpret_cast<const char*>(file_.data()) + kLengthBytes,
        static_cast<size_t>(length));
    if (!text.starts_with('{')) {
      fail("the header at byte 8 does not begin with {");
    }
    // The JSON parser would take a zero for the end of the text.
    if (const auto zero = text.find('\0'); zero != text.npos) {
      fail("zero in the header at byte " + std::to_string(kLengthBytes + zero));
    }
    return text;
  }

  json parse_json(std::string_view text) const {
    std::vector<std::set<std::string>> names;  // of the objects that are open
    const auto check = [&](int depth, json::parse_event_t event, json& value) {
      switch (event) {
        case json::parse_event_t::object_start:
        case json::parse_event_t::array_start:
          if (depth > kDeepestNesting) fail("the header nests too deeply");
          names.emplace_back();
          break;
        case json::parse_event_t::object_end:
        case json::parse_event_t::array_end:
          names.pop_back();
          break;
        case json::parse_event_t::key:
          if (!names.back().insert(value.get<std::string>()).second) {
            fail("the header has " + value.dump() + " twice");
          }
          break;
        case json::parse_event_t::value:
          break;
      }
      return true;
    };
    try {
      return json::parse(text, check);
    } catch (const json::parse_error& error) {
      fail("the header is not JSON at byte " +
           std::to_string(kLengthBytes + error.byte));
    } catch (const json::out_of_range& error) {
      fail("the header has a number that is out of range");
    }
  }

  Metadata parse_metadata(const json& value) const {
    if (!value.is_object()) fail("__metadata__ is not an object");
    Metadata metadata;
    for (const auto& [name, text] : value.items()) {
      if (!text.is_string()) {
        fail("__metadata__ \"" + name + "\" is not a string");
      }
      metadata[name] = text.get<std::string>();
    }
    return metadata;
  }

  TensorEntry parse_entry(const std::string& name, const json& value) const {
    if (!value.is_object()) fail(name, "its description is not an object");
    const auto field = [&](const char* key) -> const json& {
      const auto found = value.find(key);
      if (found == value.end()) fail(name, std::string(key) + " is missing");
      return *found;
    };
    const auto& dtype_name = field("dtype");
    if (!dtype_name.is_string()) fail(name, "dtype is not a string");
    const auto dtype = dtype_of(dtype_name.get<std::string>());
    if (!dtype) {
      throw Unsupported("\"" + path_ + "\": tensor \"" + name +
                        "\" has dtype " + dtype_name.get<std::string>() +
                        ", which this libtorch cannot hold");
    }

    TensorEntry entry{name, *dtype, {}, 0, 0};
    uint64_t bytes = c10::elementSize(*dtype);
    // Strides are computed as if empty dimensions were of length one.
    auto extent = static_cast<int64_t>(bytes);
    for (const auto dimension : unsigned_list(name, "shape", field("shape"))) {
      if (entry.shape.size() == kMostDimensions ||
          __builtin_mul_overflow(
              extent, std::max<uint64_t>(dimension, 1), &extent)) {
        fail(name, "its shape is too large");
      }
      bytes *= dimension;
      entry.shape.push_back(static_cast<int64_t>(dimension));
    }

    const auto offsets =
        unsigned_list(name, "data_offsets", field("data_offsets"));
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      fail(name, "data_offsets is not [begin, end]");
    }
    if (offsets[1] - offsets[0] != bytes) {
      fail(name,
           "data_offsets span " + std::to_string(offsets[1] - offsets[0]) +
               " bytes, but dtype and shape need " + std::to_string(bytes));
    }
    entry.begin = offsets[0];
    entry.end = offsets[1];
    return entry;
  }

  std::vector<uint64_t> unsigned_list(const std::string& name,
                                      const char* key,
                                      const json& value) const {
    std::vector<uint64_t> list;
    if (!value.is_array()) fail(name, std::string(key) + " is not a list");
    for (const auto& number : value) {
      if (!number.is_number_unsigned()) {
        fail(name, std::string(key) + " has an entry that is no whole number");
      }
      list.push_back(number.get<uint64_t>());
    }
    return list;
  }

  void check_coverage(std::vector<TensorEntry>& tensors, size_t size) const {
    std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
      return std::tie(a.begin, a.end, a.name) <
             std::tie(b.begin, b.end, b.name);
    });
    const auto start = file_.size() - size;
    const auto byte = [&](size_t offset) {
      return "byte " + std::to_string(start + offset);
    };
    size_t covered = 0;
    for (const auto& tensor : tensors) {
      if (tensor.end > size) {
        fail(tensor.name,
             "its data end " + std::to_string(tensor.end - size) +
                 " bytes past the end of the file at " + byte(size));
      }
      if (tensor.begin < covered) {
        fail(tensor.name, "overlaps another one at " + byte(tensor.begin));
      }
      if (tensor.begin > covered) {
        fail(tensor.name,
             "nothing covers the data before it from " + byte(covered));
      }
      covered = tensor.end;
    }
    if (covered != size) {
      fail("no tensor covers the data from " + byte(covered));
    }
  }

  std::span<std::byte> file_;
  const std::string& path_;
};

}  // namespace

SafetensorsHeader parse_header(std::span<std::byte> file,
                               const std::string& path,
                               std::span<std::byte>& data) {
  return Parser(file, path).parse(data);
}

std::string format_header(const SafetensorsHeader& header) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) root[kMetadataName] = header.metadata;
  for (const auto& tensor : header.tensors) {
    if (tensor.name == kMetadataName) {
      throw InvalidArgument("a tensor must not be named __metadata__");
    }
    root[tensor.name] = {{"dtype", name_of(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const json::type_error&) {
    throw InvalidArgument("a tensor's name or the metadata is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string result(kLengthBytes, '\0');
  std::memcpy(result.data(), &length, kLengthBytes);
  return result + text;
}

}  // namespace lockstep::checkpoint
