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
/// resizing, MADV_DONTFORK, its pages reserved). Unmapped with the last owner.
/// Ranks that are threads of one process share the mapping, so that tools which
/// tell memory by its address see them meet.
class Segment {
 public:
  /// Makes a zeroed segment. Throws BackendError with the bytes needed and the
  /// remedy where memory is lacking.
  static std::shared_ptr<Segment> create(size_t bytes);
  /// Maps a peer's segment; checks its seals and size.
  static std::shared_ptr<Segment> map(Fd fd, size_t bytes);
  ~Segment();

  [[nodiscard]] char* data() const noexcept { return data_; }
  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  static std::shared_ptr<Segment> open(Fd fd, size_t bytes);
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
                                   std::chrono::milliseconds timeout);

/// Collective over the host's ranks: each makes a segment of `bytes` and maps
/// all others'. Result i belongs to `host_ranks()[i]`.
std::vector<std::shared_ptr<Segment>> share_each(
    Liveness& liveness,
    const std::string& name,
    size_t bytes,
    std::chrono::milliseconds timeout);

}  // namespace lockstep::comm::shm
