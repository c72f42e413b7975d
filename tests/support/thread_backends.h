#pragma once

#include <string>
#include <vector>

#include "comm/backend_registry.h"

namespace lockstep {

/// The backends that were built and whose ranks can be threads, but for hybrid,
/// which is one of them on one host.
inline std::vector<std::string> thread_backends() {
  std::vector<std::string> names;
  for (const auto& name : comm::available_backends()) {
    if (name != "hybrid" && name != "mpi") names.push_back(name);
  }
  return names;
}

}  // namespace lockstep
