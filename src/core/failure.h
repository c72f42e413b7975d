#pragma once

#include <string>

namespace lockstep {

/// Layers that know of peers ask to be told when this process ends because of
/// an error. One hook; the last one set counts. Thread safe.
void set_failure_hook(void (*hook)(const std::string& reason)) noexcept;

/// Calls the hook, if there is one, before the process ends because of
/// `reason`. Call it in the catch block of the exception, if it is one: its
/// type tells who is to blame. Thread safe.
void announce_failure(const std::string& reason) noexcept;

}  // namespace lockstep
