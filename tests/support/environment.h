#pragma once

#include <map>
#include <string>

namespace lockstep::test {

/// Sets variables of the own process (an empty value removes one) and puts the
/// former values back at the end.
class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const std::map<std::string, std::string>& values);
  ~ScopedEnvironment();
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  std::map<std::string, std::string> former_;
};

}  // namespace lockstep::test
