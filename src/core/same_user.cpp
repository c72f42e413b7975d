#include "core/same_user.h"

#include <sys/socket.h>
#include <unistd.h>

namespace lockstep {

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

}  // namespace lockstep
