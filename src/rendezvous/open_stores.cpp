#include "rendezvous/open_stores.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "rendezvous/roll_call.h"

namespace lockstep::rendezvous {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

const std::string kGenerationKey = "lockstep/generation";

struct OpenStores {
  struct Entry {
    StorePtr store;
    int generation = -1;  ///< of the last group over it; -1: none yet
  };
  std::mutex mutex;
  std::map<std::string, Entry> entries;
  /// Of the process that this one was forked from: its connections are not ours
  /// to use or to close.
  std::vector<std::map<std::string, Entry>> of_parent;

  OpenStores();
};

OpenStores& open_stores() {
  static auto* const instance = new OpenStores;  // outlives static destructors
  return *instance;
}

OpenStores::OpenStores() {
  ::pthread_atfork([] { open_stores().mutex.lock(); },
                   [] { open_stores().mutex.unlock(); },
                   [] {
                     OpenStores& open = open_stores();
                     open.of_parent.push_back(std::exchange(open.entries, {}));
                     open.mutex.unlock();
                   });
}

int last_generation(const std::string& place) {
  OpenStores& open = open_stores();
  const std::lock_guard lock(open.mutex);
  const auto found = open.entries.find(place);
  return found == open.entries.end() ? -1 : found->second.generation;
}

int told_generation(c10d::Store& store, int rank, const Deadline& deadline) {
  try {
    store.wait({kGenerationKey},
               std::max(deadline.remaining(), std::chrono::milliseconds(1)));
  } catch (const c10::DistStoreError&) {
    throw TimeoutError(
        "rank 0 did not arrive in time; start all ranks with the same "
        "WORLD_SIZE and master address, or raise the timeout",
        {.operation = "init_process_group",
         .rank = rank,
         .peers = {0},
         .elapsed = deadline.elapsed()});
  }
  return std::stoi(store.get_to_str(kGenerationKey));
}

}  // namespace

StorePtr find_store(const std::string& place) {
  OpenStores& open = open_stores();
  const std::lock_guard lock(open.mutex);
  const auto found = open.entries.find(place);
  return found == open.entries.end() ? nullptr : found->second.store;
}

void keep_store(const std::string& place, StorePtr store) {
  OpenStores& open = open_stores();
  const std::lock_guard lock(open.mutex);
  open.entries[place] = {std::move(store)};
}

void forget_store(const std::string& place) {
  OpenStores& open = open_stores();
  const std::lock_guard lock(open.mutex);
  open.entries.erase(place);
}

void close_stores() {
  OpenStores& open = open_stores();
  const std::lock_guard lock(open.mutex);
  open.entries.clear();
}

int next_generation(const std::string& place,
                    int rank,
                    const StorePtr& store,
                    const Deadline& deadline) {
  const int last = last_generation(place);
  int generation = rank == 0 || last >= 0
                       ? last + 1
                       : told_generation(*store, rank, deadline);
  while (roll_call_is_over(*group_store(store, generation), rank)) ++generation;
  if (rank == 0) store->set(kGenerationKey, std::to_string(generation));
  OpenStores& open = open_stores();
  const std::lock_guard lock(open.mutex);
  open.entries[place].generation = generation;
  return generation;
}

StorePtr group_store(const StorePtr& store, int generation) {
  return c10::make_intrusive<c10d::PrefixStore>(
      std::to_string(generation) + '/',
      c10::make_intrusive<c10d::PrefixStore>("default_pg", store));
}

}  // namespace lockstep::rendezvous
