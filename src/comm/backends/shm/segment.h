#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/fd.h"

namespace lockstep::comm {
class Liveness;
}

namespace lockstep::comm::shm {

/// One mapping of an anonymous shared segment (memfd: CLOEXEC, sealed against
/// resizing, MADV_DONTFORK, the pages in use reserved). Unmapped with the last
/// owner.
/// Ranks that are threads of one process share the mapping, so that tools which
/// tell memory by its address see them meet.
class Segment {
 public:
  /// Which pages are reserved from the start.
  enum class Pages {
    kAll,
    kOnDemand,  ///< none: touch only what `reserve` has reserved
  };

  /// Makes a zeroed segment. Throws as `reserve` does.
  static std::shared_ptr<Segment> create(size_t bytes,
                                         Pages pages = Pages::kAll);
  /// Maps a peer's segment; checks its seals and size.
  static std::shared_ptr<Segment> map(Fd fd,
                                      size_t bytes,
                                      Pages pages = Pages::kAll);
  ~Segment();

  /// Reserves the pages of a stretch, in all mappings; what is reserved stays
  /// so. Throws BackendError with the bytes needed and the remedy where memory
  /// is lacking. Thread safe.
  void reserve(size_t offset, size_t bytes);

  [[nodiscard]] char* data() const noexcept { return data_; }
  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  static std::shared_ptr<Segment> open(Fd fd, size_t bytes, Pages pages);
  Segment(Fd fd, char* data, size_t size);
  Fd fd_;
  char* data_;
  size_t size_;
};

/// Collective over the host's ranks (`liveness.host_ranks()`): the lowest rank
/// makes a segment under `name`, all map it.
std::shared_ptr<Segment> share_one(Liveness& liveness,
                                   const std::string& name,
                                   size_t bytes,
                                   std::chrono::milliseconds timeout,
                                   Segment::Pages pages = Segment::Pages::kAll);

/// Collective over the host's ranks: each makes a segment of `bytes` and maps
/// all others'. Result i belongs to `host_ranks()[i]`.
std::vector<std::shared_ptr<Segment>> share_each(
    Liveness& liveness,
    const std::string& name,
    size_t bytes,
    std::chrono::milliseconds timeout);

}  // namespace lockstep::comm::shm
