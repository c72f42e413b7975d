#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "support/multiprocess.h"

namespace lockstep::test {

/// `lockstep run arguments...`
inline Command lockstep_run(std::vector<std::string> arguments,
                            Environment env = {}) {
  arguments.insert(arguments.begin(), {LOCKSTEP_COMMAND, "run"});
  return {.argv = std::move(arguments), .env = std::move(env)};
}

/// `lockstep run -n workers sh -c script`
inline Command run_shell(int workers,
                         const std::string& script,
                         Environment env = {}) {
  return lockstep_run({"-n", std::to_string(workers), "sh", "-c", script},
                      std::move(env));
}

using Lines = std::vector<std::string>;

inline Lines lines_of(const std::string& text) {
  Lines lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// For what several processes write in any order.
inline Lines sorted_lines(const std::string& text) {
  auto lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

/// Processes, other than zombies, whose command line contains `tag`.
inline int processes_with(const std::string& tag) {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc", ignored)) {
    std::ifstream file(entry.path() / "cmdline");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (text.find(tag) != std::string::npos) ++count;
  }
  return count;
}

/// Waits until no process has `tag` in its command line.
inline bool all_gone(const std::string& tag, milliseconds timeout) {
  const Deadline deadline(timeout);
  while (processes_with(tag) > 0) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

/// A word that no other process on this machine has in its command line.
inline std::string unique_tag() {
  static int count = 0;
  return "tag-" + std::to_string(::getpid()) + '-' + std::to_string(++count);
}

/// Waits until `file` exists.
inline bool appears(const std::string& file, milliseconds timeout = 20s) {
  const Deadline deadline(timeout);
  while (!std::filesystem::exists(file)) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

}  // namespace lockstep::test
