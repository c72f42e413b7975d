#include "comm/uncaught.h"

#include <cxxabi.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <set>
#include <string>

#include "comm/blame.h"
#include "comm/liveness/registry.h"
#include "comm/liveness/watcher.h"
#include "launch/error_file.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

std::terminate_handler previous = nullptr;

std::string type_name(const std::type_info& type) {
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, nullptr), std::free);
  return name ? name.get() : type.name();
}

struct Uncaught {
  std::string text;
  bool consequence = false;  ///< of another rank's end
};

Uncaught current() {
  const auto* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return {.text = "std::terminate was called"};
  const auto name = "uncaught " + type_name(*type);
  try {
    throw;
  } catch (const PeerLost& error) {
    return {.text = name + ": " + error.what(), .consequence = true};
  } catch (const std::exception& error) {
    return {.text = name + ": " + error.what()};
  } catch (...) {
    return {.text = name};
  }
}

[[noreturn]] void handle() {
  try {
    const auto uncaught = current();
    std::set<std::string> ranks;  // one, but for ranks that are threads
    liveness::visit_registry([&](const liveness::Watcher& watcher) {
      ranks.insert("rank " +
                   std::to_string(watcher.global_rank(watcher.rank())) + '/' +
                   std::to_string(watcher.global_world_size()));
    });
    std::string who;
    for (const auto& rank : ranks) who += (who.empty() ? "" : ", ") + rank;
    if (who.empty()) who = "lockstep";
    const auto line = '[' + who + "] " + uncaught.text + '\n';
    [[maybe_unused]] const auto written =
        ::write(STDERR_FILENO, line.data(), line.size());
    // Before the peers hear of it, so that theirs are the later errors.
    launcher::record_error(uncaught.text, uncaught.consequence);
    liveness::visit_registry([&](liveness::Watcher& watcher) {
      announce_current_exception(watcher, uncaught.text);
    });
  } catch (...) {
  }
  if (previous != nullptr) previous();
  std::abort();
}

}  // namespace

void install_uncaught_handler() {
  [[maybe_unused]] static const bool once = [] {
    previous = std::set_terminate(handle);
    return true;
  }();
}

}  // namespace lockstep::comm
