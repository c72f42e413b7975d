#pragma once

namespace lockstep::comm {

/// Installs, once per process, a terminate handler: it writes the uncaught
/// exception's type and text to stderr and for the launcher, tells the other
/// ranks who is to blame, and calls the handler that was there before. Thread
/// safe.
void install_uncaught_handler();

}  // namespace lockstep::comm
