#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::rendezvous {

/// A taken-apart init_method.
struct Url {
  enum class Scheme { Env, Tcp, File };
  Scheme scheme = Scheme::Env;
  std::string host;   ///< tcp
  uint16_t port = 0;  ///< tcp
  std::string path;   ///< file, absolute
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// "env://", "tcp://host:port" (IPv6 in brackets) or "file:///path", each with
/// an optional "?rank=R&world_size=W".
/// \throws InvalidArgument  that shows the URL and what is expected
Url parse_url(const std::string& text);

}  // namespace lockstep::rendezvous
