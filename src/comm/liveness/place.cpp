#include "comm/liveness/place.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "core/host.h"

namespace lockstep::comm::liveness {
namespace {

std::string boot_id() {
  std::string id = "?";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string name_space(const char* path) {
  struct stat status = {};
  return ::stat(path, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

}  // namespace

std::string own_place() {
  return boot_id() + '/' + name_space("/proc/self/ns/net") + '/' +
         name_space("/proc/self/ns/user") + '/' + std::to_string(::geteuid()) +
         '/' + host_name();
}

}  // namespace lockstep::comm::liveness
