#include "checkpoint/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

constexpr size_t kLargestWrite = size_t{1} << 30;

std::string random_suffix() {
  std::array<uint8_t, 8> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) !=
      static_cast<ssize_t>(bytes.size())) {
    throw CheckpointError("the system has no random numbers");
  }
  std::string text;
  for (const auto byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

/// The file that is to be replaced: a link stays.
std::filesystem::path behind_link(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  const auto target = std::filesystem::weakly_canonical(path, error);
  return error ? path : target;
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& path)
    : path_(behind_link(path)),
      folder_(path_.has_parent_path() ? path_.parent_path() : "."),
      prefix_('.' + path_.filename().string() + ".tmp-") {
  std::error_code error;
  if (std::filesystem::is_directory(path_, error)) fail("write", EISDIR);
  std::filesystem::create_directories(folder_, error);
  if (error) fail("make the folder of", error.value());
  remove_stale();
  create();
}

AtomicFile::~AtomicFile() {
  if (fd_) ::unlink(temporary_.c_str());
}

void AtomicFile::create() {
  for (;;) {
    temporary_ = folder_ / (prefix_ + random_suffix());
    fd_.reset(::open(
        temporary_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666));
    if (!fd_ && errno == EEXIST) continue;
    if (!fd_) fail("create", errno);
    // Another writer may take the file for stale before it is locked: it then
    // holds the lock, or has removed the file. Where the file system has no
    // locks, nobody takes a file for stale.
    if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      ::unlink(temporary_.c_str());
      continue;
    }
    struct stat status {};
    if (::fstat(fd_.get(), &status) != 0) fail("inspect", errno);
    if (status.st_nlink > 0) return;
  }
}

void AtomicFile::remove_stale() const {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder_, error), end;
       !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(prefix_)) continue;
    const Fd fd(::open(entry->path().c_str(),
                       O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (fd && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) {
      ::unlink(entry->path().c_str());
    }
  }
}

void AtomicFile::write(const void* data, size_t size) {
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const auto written =
        ::write(fd_.get(), from, std::min(size, kLargestWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", errno);
    from += written;
    size -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  struct stat old {};
  if (::stat(path_.c_str(), &old) == 0) {
    // Some file systems have no modes.
    [[maybe_unused]] const int kept = ::fchmod(fd_.get(), old.st_mode & 0777);
  }
  if (::fsync(fd_.get()) != 0) fail("sync", errno);
  const Fd folder(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) fail("open the folder of", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename", errno);
  fd_.reset();
  // Some file systems cannot sync a folder and say EINVAL.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) {
    throw CheckpointError("\"" + path_.string() +
                          "\" is written, but may not survive a power "
                          "failure: cannot sync its folder: " +
                          std::generic_category().message(errno));
  }
}

void AtomicFile::fail(const char* operation, int error) const {
  throw CheckpointError("cannot " + std::string(operation) + " \"" +
                        path_.string() +
                        "\": " + std::generic_category().message(error));
}

}  // namespace lockstep::checkpoint
