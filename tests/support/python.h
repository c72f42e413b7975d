#pragma once

#include <string>
#include <vector>

namespace lockstep::test {

/// Runs a script of tests/interop for at most 100 s and returns what it
/// printed; any other end than success throws. For tests that `interop_test`
/// registers: it sets the interpreter and the folder.
std::string run_python(const std::string& script,
                       const std::vector<std::string>& arguments = {});

}  // namespace lockstep::test
