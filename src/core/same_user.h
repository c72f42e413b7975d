#pragma once

namespace lockstep {

/// Whether the other end of a Unix socket runs as the same user.
bool same_user(int socket);

}  // namespace lockstep
