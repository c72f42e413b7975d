#include "support/environment.h"

#include <cstdlib>

namespace lockstep::test {
namespace {

void set(const std::string& name, const std::string& value) {
  if (value.empty()) {
    ::unsetenv(name.c_str());
  } else {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
}

}  // namespace

ScopedEnvironment::ScopedEnvironment(
    const std::map<std::string, std::string>& values) {
  for (const auto& [name, value] : values) {
    const char* former = std::getenv(name.c_str());
    former_[name] = former ? former : "";
    set(name, value);
  }
}

ScopedEnvironment::~ScopedEnvironment() {
  for (const auto& [name, value] : former_) set(name, value);
}

}  // namespace lockstep::test
