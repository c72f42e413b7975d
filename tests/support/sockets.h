#pragma once

#include <string>
#include <vector>

namespace lockstep::test {

/// Addresses ("127.0.0.1:80", "[::1]:80") at which this process listens, by
/// /proc/net/tcp and tcp6.
std::vector<std::string> listeners();

/// Those of `listeners()` that another machine could reach.
std::vector<std::string> listeners_off_loopback();

/// Number of sockets of any kind that this process has open.
int open_sockets();

/// Number of threads of this process.
int threads();

}  // namespace lockstep::test
