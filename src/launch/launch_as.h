#pragma once

#include "lockstep/launch/launch.h"

namespace lockstep::launcher {

/// `lockstep::launch`, for the launcher's own process or a program that calls
/// it: see AgentOptions.
LaunchResult launch(const LaunchConfig& config, bool own_process);

}  // namespace lockstep::launcher
