#include "support/python.h"

#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "support/multiprocess.h"

namespace lockstep::test {
namespace {

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    throw std::runtime_error(std::string(name) + " is not set: run by ctest");
  }
  return value;
}

}  // namespace

std::string run_python(const std::string& script,
                       const std::vector<std::string>& arguments) {
  Command command{{setting("LOCKSTEP_PYTHON"),
                   setting("LOCKSTEP_PYTHON_SCRIPTS") + "/" + script}};
  command.argv.insert(command.argv.end(), arguments.begin(), arguments.end());
  auto result = run(command, 100s);
  if (!result.ok()) {
    std::ostringstream text;
    text << script << " failed: " << result;
    throw std::runtime_error(text.str());
  }
  return std::move(result.out);
}

}  // namespace lockstep::test
