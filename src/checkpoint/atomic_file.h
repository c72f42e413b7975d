#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "core/fd.h"

namespace lockstep::checkpoint {

/// A file that appears whole or not at all. What is written goes to a temporary
/// in the folder of `path`; `commit` syncs it and renames it to `path`. Without
/// a commit the destructor removes it.
///
/// The temporary is locked while its writer lives. A new writer of the same
/// path removes those whose writer is gone.
class AtomicFile {
 public:
  /// Makes missing folders. \throws CheckpointError
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// \throws CheckpointError
  void write(const void* data, size_t size);
  /// \throws CheckpointError
  void commit();

 private:
  void create();
  void remove_stale() const;
  [[noreturn]] void fail(const char* operation, int error) const;

  std::filesystem::path path_;
  std::filesystem::path folder_;
  std::string prefix_;  ///< of the names of all temporaries of this path
  std::filesystem::path temporary_;
  Fd fd_;
};

}  // namespace lockstep::checkpoint
