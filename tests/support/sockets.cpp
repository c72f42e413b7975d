#include "support/sockets.h"

#include <arpa/inet.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace lockstep::test {
namespace {

constexpr const char* kListen = "0A";

std::set<std::string> socket_inodes() {
  std::set<std::string> inodes;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry, gone).string();
    if (target.rfind("socket:[", 0) == 0) {
      inodes.insert(target.substr(8, target.size() - 9));
    }
  }
  return inodes;
}

struct Listener {
  std::string address;
  bool loopback = false;
};

/// `hex` is "ADDRESS:PORT", the address in 32-bit words of host order.
Listener decode(const std::string& hex) {
  const auto colon = hex.find(':');
  const std::string port =
      std::to_string(std::stoul(hex.substr(colon + 1), nullptr, 16));
  std::array<uint32_t, 4> words{};
  const size_t count = colon / 8;
  for (size_t i = 0; i < count; ++i) {
    words[i] =
        static_cast<uint32_t>(std::stoul(hex.substr(8 * i, 8), nullptr, 16));
  }
  char text[INET6_ADDRSTRLEN] = {};
  ::inet_ntop(count == 1 ? AF_INET : AF_INET6, words.data(), text, sizeof text);
  const std::string address = text;
  return {count == 1 ? address + ':' + port : '[' + address + "]:" + port,
          address.rfind("127.", 0) == 0 || address == "::1" ||
              address.rfind("::ffff:127.", 0) == 0};
}

std::vector<Listener> find_listeners() {
  const auto own = socket_inodes();
  std::vector<Listener> found;
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(file);
    std::string line;
    std::getline(table, line);
    while (std::getline(table, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer, retransmits,
          user, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >>
          retransmits >> user >> timeout >> inode;
      if (state == kListen && own.count(inode)) found.push_back(decode(local));
    }
  }
  return found;
}

}  // namespace

std::vector<std::string> listeners() {
  std::vector<std::string> addresses;
  for (const auto& l : find_listeners()) addresses.push_back(l.address);
  return addresses;
}

std::vector<std::string> listeners_off_loopback() {
  std::vector<std::string> addresses;
  for (const auto& l : find_listeners()) {
    if (!l.loopback) addresses.push_back(l.address);
  }
  return addresses;
}

int open_sockets() {
  return static_cast<int>(socket_inodes().size());
}

int threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

}  // namespace lockstep::test
