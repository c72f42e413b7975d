#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/export.h"
#include "lockstep/data/collate.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

struct DataLoaderOptions {
  /// Items per batch.
  int64_t batch_size = 1;
  /// A new random order per pass. Excludes `sampler`.
  bool shuffle = false;
  /// Which items a pass visits, in which order. Default: all, in order.
  AnySampler sampler = {};
  /// Drop the last batch when it is not full.
  bool drop_last = false;
  /// Threads that make batches ahead of the program; 0: the calling thread
  /// makes each batch when it is asked for. Random numbers that a data set
  /// draws from libtorch's default generator depend on the threads' order, and
  /// so do those the program draws meanwhile: give such a data set a generator
  /// of its own, seeded by the index.
  int num_workers = 0;
  /// Batches in flight per worker.
  int prefetch_factor = 2;
  /// Longest wait for a worker's batch.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Source of `shuffle`; unset: libtorch's default generator. The orders are
  /// those of Python's loader for the same generator or `manual_seed`.
  std::optional<at::Generator> generator = {};
};

namespace detail {

/// What a loader needs to know apart from its types.
class LOCKSTEP_API BatchPlan {
 public:
  /// \throws InvalidArgument
  BatchPlan(int64_t dataset_size, DataLoaderOptions options);

  /// Number of batches.
  [[nodiscard]] int64_t size() const;
  [[nodiscard]] const DataLoaderOptions& options() const { return options_; }
  /// Begins a pass: its checked indices, without those that are dropped.
  [[nodiscard]] at::Tensor next_pass() const;
  /// The indices of one batch of a pass.
  [[nodiscard]] at::Tensor batch_indices(const at::Tensor& pass,
                                         int64_t batch) const;

 private:
  int64_t dataset_size_;
  DataLoaderOptions options_;
};

/// Runs `produce(item, slot)` for items 0, 1, ... on worker threads and hands
/// their slots out in order. Items that are in work at once have different
/// slots.
class LOCKSTEP_API Prefetcher {
 public:
  using Produce = std::function<void(int64_t item, int64_t slot)>;

  /// `produce` must own all it touches.
  Prefetcher(int64_t items, const DataLoaderOptions& options, Produce produce);
  /// Ends the workers after the item they have in work.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  [[nodiscard]] static int64_t slots(const DataLoaderOptions& options);
  /// Slot of the next item, valid until the next call. Rethrows what `produce`
  /// threw for it. \throws TimeoutError
  int64_t next();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace detail

/// Hands out a data set in batches; iterating it is one pass:
///
///     for (auto& [x, y] : loader) ...
///
/// A batch is what the data set's `get_batch` returns or, without one, its
/// items run through `collate`. It is overwritten when the next one is asked
/// for; move from it to keep it. Batches come in the sampler's order however
/// many workers there are. An exception that the data set throws reaches the
/// calling thread as it is, at the batch it belongs to, and ends the pass. A
/// pass may be left at any time; several may run at once. Mirrors
/// `torch.utils.data.DataLoader`.
///
/// Thread safety: one thread per loader or pass; copies share data set and
/// sampler.
template <Dataset D, typename Collate = DefaultCollate>
class DataLoader {
  static_assert(!BatchDataset<D> || std::is_same_v<Collate, DefaultCollate>,
                "a data set with get_batch makes its batches itself");

  static auto make_batch(D& dataset,
                         const Collate& collate,
                         const at::Tensor& indices) {
    if constexpr (BatchDataset<D>) {
      return dataset.get_batch(indices);
    } else {
      std::vector<std::remove_cvref_t<decltype(dataset.get(int64_t{}))>> items;
      const auto count = indices.numel();
      const auto* index = indices.template const_data_ptr<int64_t>();
      items.reserve(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        items.push_back(dataset.get(index[i]));
      }
      return collate(std::move(items));
    }
  }

 public:
  using Batch = decltype(make_batch(std::declval<D&>(),
                                    std::declval<const Collate&>(),
                                    std::declval<const at::Tensor&>()));

  /// Takes a copy of `dataset`, or moves it.
  /// `collate`: called with a `std::vector` of items, from the workers' threads
  /// if there are any; must not be given for a `BatchDataset`.
  /// \throws InvalidArgument when a number is out of range, `sampler` and
  ///     `shuffle` are both set, or `shuffle` meets an empty data set
  explicit DataLoader(D dataset,
                      DataLoaderOptions options = {},
                      Collate collate = {})
      : DataLoader(std::make_shared<D>(std::move(dataset)),
                   std::move(options),
                   std::move(collate)) {}

  /// Shares `dataset`.
  explicit DataLoader(std::shared_ptr<D> dataset,
                      DataLoaderOptions options = {},
                      Collate collate = {})
      : source_(std::make_shared<Source>(
            std::move(dataset), std::move(options), std::move(collate))) {}

  class Iterator;

  /// Begins a pass and makes its first batch.
  [[nodiscard]] Iterator begin() { return Iterator(source_); }
  [[nodiscard]] std::default_sentinel_t end() const { return {}; }

  /// Number of batches in a pass.
  [[nodiscard]] int64_t size() const { return source_->plan.size(); }
  [[nodiscard]] D& dataset() const { return *source_->dataset; }

 private:
  struct Source {
    Source(std::shared_ptr<D> data,
           DataLoaderOptions options,
           Collate collate_items)
        : dataset(std::move(data)),
          collate(std::move(collate_items)),
          plan(dataset ? dataset->size()
                       : throw InvalidArgument("DataLoader: no data set"),
               std::move(options)) {}

    Batch batch(const at::Tensor& pass, int64_t index) {
      return make_batch(*dataset, collate, plan.batch_indices(pass, index));
    }

    std::shared_ptr<D> dataset;
    Collate collate;
    detail::BatchPlan plan;
  };

  std::shared_ptr<Source> source_;
};

/// A position in a pass. Copies share the pass.
template <Dataset D, typename Collate>
class DataLoader<D, Collate>::Iterator {
 public:
  using iterator_concept = std::input_iterator_tag;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;

  [[nodiscard]] Batch& operator*() const { return *pass_->batch; }
  [[nodiscard]] Batch* operator->() const { return &*pass_->batch; }
  Iterator& operator++() {
    pass_->advance();
    return *this;
  }
  void operator++(int) { ++*this; }
  [[nodiscard]] bool operator==(std::default_sentinel_t) const {
    return !pass_->batch;
  }

 private:
  friend class DataLoader;

  struct Pass {
    std::shared_ptr<Source> source;
    at::Tensor indices;
    int64_t size = 0;
    int64_t position = 0;
    std::optional<Batch> batch;
    std::shared_ptr<std::vector<std::optional<Batch>>> slots;
    std::optional<detail::Prefetcher> prefetcher;

    void advance() {
      batch.reset();
      if (position == size) return;
      // A batch that throws ends the pass.
      const auto current = std::exchange(position, size);
      if (prefetcher) {
        auto& slot = (*slots)[static_cast<size_t>(prefetcher->next())];
        batch = std::exchange(slot, std::nullopt);
      } else {
        batch.emplace(source->batch(indices, current));
      }
      position = current + 1;
    }
  };

  explicit Iterator(std::shared_ptr<Source> source)
      : pass_(std::make_shared<Pass>()) {
    const auto& plan = source->plan;
    pass_->indices = plan.next_pass();
    pass_->size = plan.size();
    if (plan.options().num_workers > 0) {
      const auto count = detail::Prefetcher::slots(plan.options());
      pass_->slots = std::make_shared<std::vector<std::optional<Batch>>>(
          static_cast<size_t>(count));
      pass_->prefetcher.emplace(
          pass_->size,
          plan.options(),
          [source, indices = pass_->indices, slots = pass_->slots](
              int64_t item, int64_t slot) {
            (*slots)[static_cast<size_t>(slot)].emplace(
                source->batch(indices, item));
          });
    }
    pass_->source = std::move(source);
    pass_->advance();
  }

  std::shared_ptr<Pass> pass_;
};

}  // namespace lockstep::data
