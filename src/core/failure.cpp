#include "core/failure.h"

#include <atomic>
#include <exception>

#include "lockstep/core/log.h"

namespace lockstep {
namespace {

std::atomic<void (*)(const std::string&)> current{nullptr};

}  // namespace

void set_failure_hook(void (*hook)(const std::string& reason)) noexcept {
  current.store(hook);
}

void announce_failure(const std::string& reason) noexcept {
  const auto hook = current.load();
  if (hook == nullptr) return;
  try {
    hook(reason);
  } catch (const std::exception& e) {
    log::error(std::string("the peers could not be told: ") + e.what());
  }
}

}  // namespace lockstep
