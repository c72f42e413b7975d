#include "lockstep/testing/run_ranks.h"

#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "distributed/group.h"
#include "distributed/lifetime.h"
#include "lockstep/core/error.h"

namespace lockstep::testing {
namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void run_ranks(int n,
               const std::function<void(int rank)>& fn,
               InitOptions options) {
  if (n < 1) {
    throw InvalidArgument("run_ranks needs at least one rank, not " +
                          std::to_string(n));
  }
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::exception_ptr first;

  const auto rank_main = [&](int rank) {
    const distributed::ThreadRank thread_rank;
    try {
      InitOptions own = options;
      own.rank = rank;
      own.world_size = n;
      init_process_group(store, own);
      fn(rank);
    } catch (...) {
      const auto error = std::current_exception();
      {
        const std::lock_guard lock(mutex);
        if (!first) first = error;
      }
      distributed::fail_default_group(text_of(error));
    }
    destroy_process_group();
  };

  std::vector<std::thread> threads;
  threads.reserve(n);
  for (int rank = 0; rank < n; ++rank) threads.emplace_back(rank_main, rank);
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace lockstep::testing
