#include "checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

#include "core/fd.h"
#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

[[noreturn]] void fail(const std::string& path, int error) {
  throw CheckpointError("cannot read \"" + path +
                        "\": " + std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) fail(path, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail(path, errno);
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError("cannot read \"" + path + "\": not a regular file");
  }
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return;
  // Only pages that are written to take memory, so none is reserved.
  void* data = ::mmap(nullptr,
                      size,
                      PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_NORESERVE,
                      fd.get(),
                      0);
  if (data == MAP_FAILED) fail(path, errno);
  bytes_ = {static_cast<std::byte*>(data), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace lockstep::checkpoint
