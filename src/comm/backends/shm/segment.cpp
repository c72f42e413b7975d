#include "comm/backends/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "comm/backends/shm/memory_left.h"
#include "comm/liveness.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& what, int error) {
  throw BackendError("shared memory: " + what + ": " + std::strerror(error),
                     {.backend = "shm"},
                     error);
}

[[noreturn]] void fail_for_lack_of_memory(size_t needed) {
  throw BackendError(
      "a shared segment of " + std::to_string(needed) +
          " bytes is needed, but only " + std::to_string(memory_left()) +
          " bytes of memory are left; raise the memory limit of the container "
          "or machine, run fewer ranks on this host, or use the backend gloo",
      {.backend = "shm"},
      ENOMEM);
}

char* map_shared(int fd, size_t size, Segment::Pages pages) {
  const int flags =
      MAP_SHARED | (pages == Segment::Pages::kAll ? MAP_POPULATE : 0);
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) fail("mmap", errno);
  ::madvise(data, size, MADV_DONTFORK);
  return static_cast<char*>(data);
}

void reserve_pages(int fd, size_t offset, size_t bytes) {
  // Reserving more than there is would wake the kernel's OOM killer instead of
  // failing.
  if (bytes > memory_left()) fail_for_lack_of_memory(bytes);
  int reserved;
  do {
    reserved = ::fallocate(
        fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (reserved != 0 && errno == EINTR);
  if (reserved == 0) return;
  if (errno == ENOMEM || errno == ENOSPC) fail_for_lack_of_memory(bytes);
  fail("fallocate of " + std::to_string(bytes) + " bytes", errno);
}

/// Tells the segments of this process apart.
using Id = std::pair<dev_t, ino_t>;

Id id_of(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail("fstat", errno);
  return {status.st_dev, status.st_ino};
}

std::mutex open_mutex;
std::map<Id, std::weak_ptr<Segment>> open_segments;

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes, Pages pages) {
  Fd fd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail("ftruncate to " + std::to_string(bytes) + " bytes", errno);
  }
  if (pages == Pages::kAll) reserve_pages(fd.get(), 0, bytes);
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail("F_ADD_SEALS", errno);
  return open(std::move(fd), bytes, pages);
}

std::shared_ptr<Segment> Segment::map(Fd fd, size_t bytes, Pages pages) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  struct stat status {};
  if (seals < 0 || (seals & kSeals) != kSeals ||
      ::fstat(fd.get(), &status) != 0 ||
      static_cast<size_t>(status.st_size) != bytes) {
    throw BackendError(
        "shared memory: the descriptor that a peer sent is not a sealed "
        "segment of " +
            std::to_string(bytes) +
            " bytes; do all ranks run the same program?",
        {.backend = "shm"});
  }
  return open(std::move(fd), bytes, pages);
}

std::shared_ptr<Segment> Segment::open(Fd fd, size_t bytes, Pages pages) {
  const std::lock_guard lock(open_mutex);
  std::erase_if(open_segments,
                [](const auto& entry) { return entry.second.expired(); });
  auto& entry = open_segments[id_of(fd.get())];
  if (auto segment = entry.lock()) return segment;
  char* data = map_shared(fd.get(), bytes, pages);
  const std::shared_ptr<Segment> segment(
      new Segment(std::move(fd), data, bytes));
  entry = segment;
  return segment;
}

Segment::Segment(Fd fd, char* data, size_t size)
    : fd_(std::move(fd)), data_(data), size_(size) {
}

Segment::~Segment() {
  ::munmap(data_, size_);
}

void Segment::reserve(size_t offset, size_t bytes) {
  reserve_pages(fd_.get(), offset, bytes);
}

std::shared_ptr<Segment> share_one(Liveness& liveness,
                                   const std::string& name,
                                   size_t bytes,
                                   std::chrono::milliseconds timeout,
                                   Segment::Pages pages) {
  const auto& ranks = liveness.host_ranks();
  const int owner = ranks.front();
  if (liveness.rank() != owner) {
    return Segment::map(
        liveness.receive_fd(owner, name, timeout), bytes, pages);
  }
  auto segment = Segment::create(bytes, pages);
  for (const int peer : ranks) {
    if (peer != owner) liveness.send_fd(peer, name, segment->fd());
  }
  return segment;
}

std::vector<std::shared_ptr<Segment>> share_each(
    Liveness& liveness,
    const std::string& name,
    size_t bytes,
    std::chrono::milliseconds timeout) {
  const auto& ranks = liveness.host_ranks();
  const auto own = Segment::create(bytes);
  for (const int peer : ranks) {
    if (peer != liveness.rank()) liveness.send_fd(peer, name, own->fd());
  }
  std::vector<std::shared_ptr<Segment>> segments;
  segments.reserve(ranks.size());
  for (const int peer : ranks) {
    segments.push_back(
        peer == liveness.rank()
            ? own
            : Segment::map(liveness.receive_fd(peer, name, timeout), bytes));
  }
  return segments;
}

}  // namespace lockstep::comm::shm
