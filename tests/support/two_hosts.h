#pragma once

#include <unistd.h>

#include <string>

#include "support/multiprocess.h"

namespace lockstep::test {

/// Two network namespaces with a cable between them, in place of two hosts.
class TwoHosts {
 public:
  TwoHosts() : tag_(std::to_string(::getpid())) {
    made_ = ip("netns add " + host(0)) && ip("netns add " + host(1)) &&
            ip("link add lk0" + tag_ + " netns " + host(0) +
               " type veth peer name lk1" + tag_ + " netns " + host(1));
    for (int i = 0; made_ && i < 2; ++i) {
      const auto link = "lk" + std::to_string(i) + tag_;
      made_ =
          ip("-n " + host(i) + " addr add " + address(i) + "/24 dev " + link) &&
          ip("-n " + host(i) + " link set " + link + " up") &&
          ip("-n " + host(i) + " link set lo up");
    }
  }
  ~TwoHosts() {
    ip("netns del " + host(0));
    ip("netns del " + host(1));
  }

  /// False when this user may not make namespaces.
  [[nodiscard]] bool made() const { return made_; }
  [[nodiscard]] static std::string address(int index) {
    return "10.77.0." + std::to_string(index + 1);
  }
  Command on(int index, Command command) const {
    command.argv.insert(command.argv.begin(),
                        {"ip", "netns", "exec", host(index)});
    return command;
  }

 private:
  [[nodiscard]] std::string host(int index) const {
    return "lockstep" + tag_ + "-" + std::to_string(index);
  }
  static bool ip(const std::string& arguments) {
    return run({.argv = {"sh", "-c", "ip " + arguments}}, 10s).ok();
  }

  const std::string tag_;
  bool made_ = false;
};

}  // namespace lockstep::test
