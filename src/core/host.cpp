#include "core/host.h"

#include <unistd.h>

namespace lockstep {

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

}  // namespace lockstep
