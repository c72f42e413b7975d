#pragma once

/// Marks a symbol of the library as public. Everything else is hidden.
#define LOCKSTEP_API __attribute__((visibility("default")))
