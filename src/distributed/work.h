#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "distributed/group.h"
#include "lockstep/distributed/collectives.h"

namespace lockstep {

/// An operation under way. A null pointer in its place is a finished one.
struct Work::Impl {
  std::shared_ptr<distributed::Group> group;
  const char* operation;
  c10::intrusive_ptr<c10d::Work> work;
  std::mutex mutex;
  std::function<void()> finish;  ///< runs once, after success

  void wait(std::optional<std::chrono::milliseconds> timeout);
};

}  // namespace lockstep
