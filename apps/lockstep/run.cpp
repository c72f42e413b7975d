#include "commands.h"
#include "lockstep/launch/launch.h"
#include "run_options.h"

namespace lockstep {

int run_command(const std::vector<std::string>& arguments) {
  const LaunchResult result = launch(parse_run_options(arguments));
  return result.signal == 0 ? 0 : 128 + result.signal;
}

}  // namespace lockstep
