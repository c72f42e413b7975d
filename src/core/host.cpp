#include "core/host.h"

#include <unistd.h>

namespace lockstep {

std::string host_name() {
  char name[256] = {};
  const bool known = ::gethostname(name, sizeof name - 1) == 0 && *name != 0;
  return known ? name : "?";
}

}  // namespace lockstep
