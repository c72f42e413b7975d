#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lockstep::rendezvous {

/// This process's place in a job as the backend knows it, and from whom.
struct Assigned {
  int rank = 0;
  int world_size = 1;
  std::string source;
  /// Collective over the ranks: gives each rank all ranks' short texts.
  std::function<std::vector<std::string>(const std::string& text)> exchange;
};

}  // namespace lockstep::rendezvous
