#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lockstep::checkpoint {

/// A file in memory: private, so that writes stay in this process.
class MappedFile {
 public:
  /// \throws CheckpointError when `path` cannot be read as a regular file
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace lockstep::checkpoint
