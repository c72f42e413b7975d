#include "lockstep/checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "checkpoint/atomic_file.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/safetensors_header.h"
#include "lockstep/core/error.h"

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian");

namespace lockstep::checkpoint {
namespace {

void check_can_store(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("save: tensor \"" + name + "\" " + why);
  };
  if (!tensor.defined()) refuse("is undefined");
  if (tensor.layout() != at::kStrided) refuse("is not dense");
  if (tensor.is_meta()) refuse("is on the meta device and has no data");
  if (name_of(tensor.scalar_type()).empty()) {
    refuse(std::string("has dtype ") + c10::toString(tensor.scalar_type()) +
           ", which safetensors cannot hold");
  }
}

/// The tensors in the order of their data: large elements first, so that each
/// is aligned, then by name; as the Python package does.
SafetensorsHeader lay_out(const Tensors& tensors, const Metadata& metadata) {
  SafetensorsHeader header{{}, metadata};
  for (const auto& [name, tensor] : tensors) {
    check_can_store(name, tensor);
    header.tensors.push_back(
        {name, tensor.scalar_type(), tensor.sizes().vec(), 0, 0});
  }
  std::stable_sort(header.tensors.begin(),
                   header.tensors.end(),
                   [](const auto& a, const auto& b) {
                     return c10::elementSize(a.dtype) >
                            c10::elementSize(b.dtype);
                   });
  size_t end = 0;
  for (auto& entry : header.tensors) {
    entry.begin = end;
    end += tensors.at(entry.name).nbytes();
    entry.end = end;
  }
  return header;
}

/// The tensor over its bytes in the mapping, or a copy where these are not
/// aligned.
at::Tensor tensor_of(const TensorEntry& entry,
                     std::span<std::byte> bytes,
                     const std::shared_ptr<MappedFile>& file,
                     const std::string& path) {
  if (entry.dtype == at::kBool) {
    const auto bad = std::find_if(bytes.begin(), bytes.end(), [](auto byte) {
      return std::to_integer<int>(byte) > 1;
    });
    if (bad != bytes.end()) {
      throw CheckpointError(
          "\"" + path + "\": tensor \"" + entry.name + "\": byte " +
          std::to_string(&*bad - file->bytes().data()) + " is no BOOL");
    }
  }
  const auto options = at::TensorOptions(entry.dtype).device(at::kCPU);
  const auto alignment = c10::elementSize(entry.dtype);
  if (!bytes.empty() &&
      reinterpret_cast<uintptr_t>(bytes.data()) % alignment == 0) {
    return at::from_blob(
        bytes.data(), entry.shape, [file](void*) {}, options);
  }
  auto tensor = at::empty(entry.shape, options);
  if (!bytes.empty()) {
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  }
  return tensor;
}

}  // namespace

void save_file(const Tensors& tensors,
               const std::string& path,
               const Metadata& metadata) {
  const auto header = lay_out(tensors, metadata);
  const auto text = format_header(header);
  AtomicFile file(path);
  file.write(text.data(), text.size());
  for (const auto& entry : header.tensors) {
    const auto tensor = tensors.at(entry.name)
                            .detach()
                            .resolve_conj()
                            .resolve_neg()
                            .to(at::kCPU)
                            .contiguous();
    file.write(tensor.const_data_ptr(), tensor.nbytes());
  }
  file.commit();
}

SafetensorsFile read_safetensors(const std::string& path) {
  const auto file = std::make_shared<MappedFile>(path);
  std::span<std::byte> data;
  auto header = parse_header(file->bytes(), path, data);
  SafetensorsFile result{{}, std::move(header.metadata)};
  for (const auto& entry : header.tensors) {
    result.tensors[entry.name] = tensor_of(
        entry, data.subspan(entry.begin, entry.end - entry.begin), file, path);
  }
  return result;
}

Tensors load_file(const std::string& path) {
  return read_safetensors(path).tensors;
}

Metadata load_metadata(const std::string& path) {
  return read_safetensors(path).metadata;
}

}  // namespace lockstep::checkpoint
