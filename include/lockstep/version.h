#pragma once

// The one place that states the version; CMake reads it from here.
#define LOCKSTEP_VERSION_MAJOR 0
#define LOCKSTEP_VERSION_MINOR 1
#define LOCKSTEP_VERSION_PATCH 0
#define LOCKSTEP_VERSION "0.1.0"
