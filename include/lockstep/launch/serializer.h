#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "lockstep/core/export.h"

namespace lockstep {

/// Collects the bytes of values that go to another process of this program.
class ByteWriter {
 public:
  void write(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
  }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Gives the bytes back in the order in which they were written.
class LOCKSTEP_API ByteReader {
 public:
  /// `bytes` is borrowed.
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  /// Copies the next `size` bytes.
  /// \throws InvalidArgument  fewer are left
  void read(void* data, size_t size);
  /// The next `size` bytes in place. Throws as `read`.
  std::string_view view(size_t size);

 private:
  std::string_view bytes_;
};

namespace detail {

template <class T>
inline constexpr bool is_reference_wrapper = false;
template <class T>
inline constexpr bool is_reference_wrapper<std::reference_wrapper<T>> = true;

/// Whether a type that can be copied byte by byte refers to memory elsewhere:
/// std::reference_wrapper, or views as std::span and c10::ArrayRef are.
/// std::array holds its elements itself.
template <class T>
inline constexpr bool is_view = is_reference_wrapper<T> ||
                                (
                                    std::is_trivially_copyable_v<T> &&
                                    !requires { std::tuple_size<T>::value; } &&
                                    requires(const T& value) {
                                      {*value.data()};
                                      value.size();
                                    });

}  // namespace detail

/// How an argument of `spawn` travels to the children. There are forms for
/// trivially copyable types (not pointers nor views), std::string and
/// std::vector of these. For a type of your own:
///
///     template <>
///     struct lockstep::Serializer<Config> {
///       static void write(ByteWriter& writer, const Config& value);
///       static Config read(ByteReader& reader);
///     };
template <class T>
struct Serializer {
  static_assert(!std::is_pointer_v<T> && !std::is_member_pointer_v<T>,
                "a pointer means nothing in another process: pass the value");
  static_assert(!detail::is_view<T>,
                "a view means nothing in another process: pass the values, in "
                "a std::vector for one");
  static_assert(std::is_trivially_copyable_v<T>,
                "spawn does not know how to send this type: specialise "
                "lockstep::Serializer for it");

  static void write(ByteWriter& writer, const T& value) {
    writer.write(&value, sizeof(T));
  }
  static T read(ByteReader& reader) {
    alignas(T) std::byte storage[sizeof(T)];
    reader.read(storage, sizeof(T));
    return *std::launder(reinterpret_cast<T*>(storage));
  }
};

template <>
struct Serializer<std::string> {
  static void write(ByteWriter& writer, std::string_view value) {
    Serializer<uint64_t>::write(writer, value.size());
    writer.write(value.data(), value.size());
  }
  static std::string read(ByteReader& reader) {
    const auto size = Serializer<uint64_t>::read(reader);
    return std::string(reader.view(size));
  }
};

template <class T>
struct Serializer<std::vector<T>> {
  static void write(ByteWriter& writer, const std::vector<T>& values) {
    Serializer<uint64_t>::write(writer, values.size());
    for (const auto& value : values) Serializer<T>::write(writer, value);
  }
  static std::vector<T> read(ByteReader& reader) {
    std::vector<T> values;
    const auto size = Serializer<uint64_t>::read(reader);
    for (uint64_t i = 0; i < size; ++i) {
      values.push_back(Serializer<T>::read(reader));
    }
    return values;
  }
};

}  // namespace lockstep
