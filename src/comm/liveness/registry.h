#pragma once

#include <functional>

namespace lockstep::comm::liveness {

class Watcher;

/// The watchers of this process that have met their peers. The first one adds
/// the hooks: goodbye at `exit`, closed connections in a forked child. Thread
/// safe, also during exit.
void add_to_registry(Watcher& watcher);
/// Waits for a visit that is under way.
void remove_from_registry(Watcher& watcher);
void visit_registry(const std::function<void(Watcher&)>& visit);

}  // namespace lockstep::comm::liveness
