#pragma once

#include <string>

namespace lockstep::rendezvous {

/// This process's place in a job as the backend knows it, and from whom.
struct Assigned {
  int rank = 0;
  int world_size = 1;
  std::string source;
};

}  // namespace lockstep::rendezvous
