#include "rendezvous/job_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "core/fd.h"
#include "core/poll_until.h"
#include "core/same_user.h"
#include "lockstep/core/error.h"

namespace lockstep::rendezvous {
namespace {

using std::chrono::milliseconds;

constexpr auto kRetryPause = milliseconds(5);
constexpr auto kAnswerPatience = milliseconds(5000);

struct JobAddress {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit JobAddress(const std::string& job) {
    const std::string name =
        "lockstep/" + std::to_string(::geteuid()) + '/' + job;
    if (name.size() + 1 > sizeof address.sun_path) {
      throw InvalidArgument("the job's name \"" + job +
                                "\" is too long to meet by; set MASTER_ADDR "
                                "and MASTER_PORT",
                            {.operation = "init_process_group"});
    }
    address.sun_family = AF_UNIX;
    // An abstract name: a leading zero byte, no file.
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                    name.size());
  }
  [[nodiscard]] const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&address);
  }
};

Fd unix_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) {
    throw BackendError(
        std::string("cannot make a Unix socket: ") + std::strerror(errno),
        {.operation = "init_process_group"},
        errno);
  }
  return fd;
}

/// Receives one number; false when the peer went away or kept silent.
template <class T>
bool receive(int fd, T& value, const Deadline& deadline) {
  return poll_until(fd, POLLIN, deadline) &&
         ::recv(fd, &value, sizeof value, 0) == sizeof value;
}

template <class T>
bool send(int fd, const T& value) {
  return ::send(fd, &value, sizeof value, MSG_NOSIGNAL) == sizeof value;
}

/// The next caller; none at the deadline, or when it went away again.
Fd accept_one(int listener, const Deadline& deadline) {
  if (!poll_until(listener, POLLIN, deadline)) return {};
  Fd peer(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!peer && errno != EINTR && errno != ECONNABORTED) {
    throw BackendError(std::string("cannot accept a rank of the job: ") +
                           std::strerror(errno) +
                           "; is the limit of open files (ulimit -n) reached?",
                       {.operation = "init_process_group", .rank = 0},
                       errno);
  }
  return peer;
}

[[noreturn]] void fail_missing(const std::string& job,
                               int rank,
                               std::vector<int> missing,
                               const Deadline& deadline) {
  std::string text = missing.size() == 1 ? "rank" : "ranks";
  for (const int r : missing) text += ' ' + std::to_string(r);
  throw TimeoutError(text + " of job " + job +
                         " did not come to this host's meeting point; start "
                         "all ranks on one host, or set MASTER_ADDR and "
                         "MASTER_PORT",
                     {.operation = "init_process_group",
                      .rank = rank,
                      .peers = std::move(missing),
                      .elapsed = deadline.elapsed()});
}

}  // namespace

void hand_out_port(const std::string& job,
                   int world_size,
                   uint16_t port,
                   const Deadline& deadline) {
  const JobAddress address(job);
  const Fd listener = unix_socket();
  if (::bind(listener.get(), address.get(), address.length) != 0 ||
      ::listen(listener.get(), world_size) != 0) {
    throw StoreError("the meeting point of job " + job +
                         " cannot be opened: " + std::strerror(errno) +
                         "; is another process rank 0 of the same job?",
                     {.operation = "init_process_group", .rank = 0});
  }
  std::vector<int> missing;
  for (int rank = 1; rank < world_size; ++rank) missing.push_back(rank);
  while (!missing.empty()) {
    const Fd peer = accept_one(listener.get(), deadline);
    int32_t rank = 0;
    if (deadline.passed()) fail_missing(job, 0, std::move(missing), deadline);
    if (!peer || !same_user(peer.get()) ||
        !receive(peer.get(),
                 rank,
                 Deadline(std::min(deadline.remaining(), kAnswerPatience))) ||
        !send(peer.get(), port)) {
      continue;
    }
    if (std::erase(missing, rank) == 0) {
      throw InvalidArgument(
          "rank " + std::to_string(rank) + " of job " + job +
              " came twice or is outside a world of " +
              std::to_string(world_size) +
              "; give every process a rank of its own",
          {.operation = "init_process_group", .rank = 0, .peers = {rank}});
    }
  }
}

uint16_t ask_for_port(const std::string& job,
                      int rank,
                      const Deadline& deadline) {
  const JobAddress address(job);
  for (;;) {
    const Fd fd = unix_socket();
    uint16_t port = 0;
    if (::connect(fd.get(), address.get(), address.length) == 0 &&
        same_user(fd.get()) && send(fd.get(), static_cast<int32_t>(rank)) &&
        receive(fd.get(), port, deadline)) {
      return port;
    }
    if (deadline.passed()) fail_missing(job, rank, {0}, deadline);
    std::this_thread::sleep_for(std::min(kRetryPause, deadline.remaining()));
  }
}

}  // namespace lockstep::rendezvous
