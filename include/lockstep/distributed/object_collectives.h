#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/launch/serializer.h"

namespace lockstep {

/// Tensors (copied, on the CPU), numbers, strings, lists, tuples and
/// dictionaries of these, as c10::IValue holds them.
template <>
struct LOCKSTEP_API Serializer<c10::IValue> {
  static void write(ByteWriter& writer, const c10::IValue& value);
  /// \throws InvalidArgument  the bytes are none
  static c10::IValue read(ByteReader& reader);
};

/// A tensor: its values, shape and dtype, on the CPU; it gets no gradient.
template <>
struct LOCKSTEP_API Serializer<at::Tensor> {
  static void write(ByteWriter& writer, const at::Tensor& value);
  static at::Tensor read(ByteReader& reader);
};

struct AllGatherObjectOptions {
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};
struct GatherObjectOptions {
  std::optional<int> dst = {};  ///< the rank that gets all objects
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::optional<int> group_dst = {};
};
struct BroadcastObjectListOptions {
  std::optional<int> src = {};  ///< the rank whose objects all get
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::optional<int> group_src = {};
};
struct ScatterObjectListOptions {
  std::optional<int> src = {};  ///< the rank that has all objects
  ProcessGroup group = {};
  std::optional<std::chrono::milliseconds> timeout = {};
  std::optional<int> group_src = {};
};

namespace detail {

LOCKSTEP_API std::vector<std::string> all_gather_bytes(
    const std::string& own, const AllGatherObjectOptions& options);
/// Nothing but at the destination.
LOCKSTEP_API std::vector<std::string> gather_bytes(
    const std::string& own, const GatherObjectOptions& options);
/// `own` is called at the source alone; nothing there.
LOCKSTEP_API std::optional<std::string> broadcast_bytes(
    const std::function<std::string()>& own,
    const BroadcastObjectListOptions& options);
/// `parts` matters at the source alone.
LOCKSTEP_API std::optional<std::string> scatter_bytes(
    const std::vector<std::string>& parts,
    const ScatterObjectListOptions& options);

template <class T>
std::string to_bytes(const T& object) {
  ByteWriter writer;
  Serializer<T>::write(writer, object);
  return writer.bytes();
}

template <class T>
T from_bytes(const std::string& bytes) {
  ByteReader reader(bytes);
  return Serializer<T>::read(reader);
}

template <class T>
std::vector<T> from_bytes_of_each(const std::vector<std::string>& parts) {
  std::vector<T> objects;
  objects.reserve(parts.size());
  for (const auto& part : parts) objects.push_back(from_bytes<T>(part));
  return objects;
}

}  // namespace detail

// Collectives of C++ objects: any type that `Serializer` knows or is
// specialised for, the same on all ranks; c10::IValue where the types differ.
// Called by every rank of the group in the same order, blocking; sizes go
// first, then bytes. The objects of a rank may have any size. Where this rank
// does not belong to the group they log a warning and leave everything as it
// is. Python ranks cannot take part: their objects are pickled. Errors as those
// of the collectives, and what the Serializer throws.

/// `object_list[r]` becomes rank r's `object`. Mirrors
/// `torch.distributed.all_gather_object`.
template <class T>
void all_gather_object(std::vector<T>& object_list,
                       const T& object,
                       const AllGatherObjectOptions& options = {}) {
  const auto parts =
      detail::all_gather_bytes(detail::to_bytes(object), options);
  if (!parts.empty()) object_list = detail::from_bytes_of_each<T>(parts);
}

/// On rank `dst`, `object_gather_list[r]` becomes rank r's `object`; on the
/// others the list stays as it is. Mirrors `torch.distributed.gather_object`.
template <class T>
void gather_object(const T& object,
                   std::vector<T>& object_gather_list,
                   const GatherObjectOptions& options = {}) {
  const auto parts = detail::gather_bytes(detail::to_bytes(object), options);
  if (!parts.empty()) object_gather_list = detail::from_bytes_of_each<T>(parts);
}

/// On every rank `object_list` becomes rank `src`'s, in number, too. Mirrors
/// `torch.distributed.broadcast_object_list`.
template <class T>
void broadcast_object_list(std::vector<T>& object_list,
                           const BroadcastObjectListOptions& options = {}) {
  const auto bytes = detail::broadcast_bytes(
      [&] { return detail::to_bytes(object_list); }, options);
  if (bytes) object_list = detail::from_bytes<std::vector<T>>(*bytes);
}

/// `output` becomes rank `src`'s `scatter_object_input_list[rank]`; the list
/// holds one object per rank, and does not matter on the other ranks. Mirrors
/// `torch.distributed.scatter_object_list`.
template <class T>
void scatter_object_list(T& output,
                         const std::vector<T>& scatter_object_input_list = {},
                         const ScatterObjectListOptions& options = {}) {
  std::vector<std::string> parts;
  for (const auto& object : scatter_object_input_list) {
    parts.push_back(detail::to_bytes(object));
  }
  const auto bytes = detail::scatter_bytes(parts, options);
  if (bytes) output = detail::from_bytes<T>(*bytes);
}

}  // namespace lockstep
