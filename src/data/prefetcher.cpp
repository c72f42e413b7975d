#include <ATen/Parallel.h>

#include <condition_variable>
#include <exception>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/data/data_loader.h"

// From the OpenMP library that libtorch brings, if it has one. Unlike
// at::set_num_threads it concerns the calling thread only.
extern "C" __attribute__((weak)) void omp_set_num_threads(int);

namespace lockstep::data::detail {
namespace {

/// Workers are the parallelism: operators inside them stay on their thread, as
/// in Python's workers.
void use_one_thread() {
  at::get_num_threads();  // libtorch's own setting of a thread comes first
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);
}

}  // namespace

struct Prefetcher::State {
  struct Slot {
    bool ready = false;
    std::exception_ptr error;
  };

  State(int64_t item_count,
        const DataLoaderOptions& options,
        Produce produce_item)
      : items(item_count),
        timeout(options.timeout),
        produce(std::move(produce_item)),
        slots(static_cast<size_t>(Prefetcher::slots(options))) {}

  Slot& slot(int64_t item) {
    return slots[static_cast<size_t>(item) % slots.size()];
  }

  void work() {
    use_one_thread();
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] {
        return stopping || claimed == items ||
               claimed < released + static_cast<int64_t>(slots.size());
      });
      if (stopping || claimed == items) return;
      const auto item = claimed++;
      lock.unlock();
      std::exception_ptr error;
      try {
        produce(item, item % static_cast<int64_t>(slots.size()));
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      slot(item) = {true, error};
      changed.notify_all();
    }
  }

  void stop() {
    {
      const std::scoped_lock lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    for (auto& thread : threads) {
      // A worker that is overdue may never come back; it owns what it uses.
      if (overdue) {
        thread.detach();
      } else {
        thread.join();
      }
    }
  }

  const int64_t items;
  const std::chrono::milliseconds timeout;
  const Produce produce;

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Slot> slots;
  int64_t claimed = 0;     // items given to workers
  int64_t handed_out = 0;  // items given to the caller
  int64_t released = 0;    // items whose slots may be filled again
  bool stopping = false;
  bool overdue = false;
  std::vector<std::thread> threads;
};

int64_t Prefetcher::slots(const DataLoaderOptions& options) {
  // One more than is made ahead: the one that the caller holds.
  return int64_t{options.num_workers} * options.prefetch_factor + 1;
}

Prefetcher::Prefetcher(int64_t items,
                       const DataLoaderOptions& options,
                       Produce produce)
    : state_(std::make_shared<State>(items, options, std::move(produce))) {
  const auto workers = std::min<int64_t>(options.num_workers, items);
  try {
    for (int64_t i = 0; i < workers; ++i) {
      state_->threads.emplace_back([state = state_] { state->work(); });
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

Prefetcher::~Prefetcher() {
  state_->stop();
}

int64_t Prefetcher::next() {
  std::unique_lock lock(state_->mutex);
  const auto item = state_->handed_out++;
  state_->released = item;
  state_->changed.notify_all();
  auto& slot = state_->slot(item);
  if (!state_->changed.wait_for(
          lock, state_->timeout, [&] { return slot.ready; })) {
    state_->overdue = true;
    throw TimeoutError("DataLoader: batch " + std::to_string(item) +
                           " was not made in time; is a data set's get() "
                           "blocked, or timeout too short?",
                       {.elapsed = state_->timeout});
  }
  slot.ready = false;
  if (const auto error = std::exchange(slot.error, nullptr)) {
    std::rethrow_exception(error);
  }
  return item % static_cast<int64_t>(state_->slots.size());
}

}  // namespace lockstep::data::detail
