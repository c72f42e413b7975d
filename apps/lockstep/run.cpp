#include "commands.h"
#include "launch/launch_as.h"
#include "run_options.h"

namespace lockstep {

int run_command(const std::vector<std::string>& arguments) {
  const LaunchResult result =
      launcher::launch(parse_run_options(arguments), true);
  return result.signal == 0 ? 0 : 128 + result.signal;
}

}  // namespace lockstep
