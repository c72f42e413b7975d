#include "lockstep/data/data_loader.h"

#include "data/random.h"
#include "lockstep/core/error.h"

namespace lockstep::data::detail {
namespace {

constexpr std::chrono::years kLongestTimeout{10};

[[noreturn]] void refuse(const std::string& message) {
  throw InvalidArgument("DataLoader: " + message);
}

}  // namespace

BatchPlan::BatchPlan(int64_t dataset_size, DataLoaderOptions options)
    : dataset_size_(dataset_size), options_(std::move(options)) {
  if (options_.batch_size < 1) {
    refuse("batch_size must be positive, but is " +
           std::to_string(options_.batch_size));
  }
  if (options_.num_workers < 0) {
    refuse("num_workers must not be negative, but is " +
           std::to_string(options_.num_workers));
  }
  if (options_.prefetch_factor < 1) {
    refuse("prefetch_factor must be positive, but is " +
           std::to_string(options_.prefetch_factor));
  }
  if (options_.timeout <= std::chrono::milliseconds::zero()) {
    refuse("timeout must be positive");
  }
  // Later would overflow the clock.
  options_.timeout =
      std::min(options_.timeout,
               std::chrono::ceil<std::chrono::milliseconds>(kLongestTimeout));
  if (options_.shuffle && options_.sampler) {
    refuse("shuffle and sampler exclude each other; let the sampler shuffle");
  }
  if (options_.shuffle) {
    options_.sampler =
        RandomSampler(dataset_size, {.generator = options_.generator});
  } else if (!options_.sampler) {
    options_.sampler = SequentialSampler(dataset_size);
  }
}

int64_t BatchPlan::size() const {
  const auto items = options_.sampler->size();
  return options_.drop_last
             ? items / options_.batch_size
             : (items + options_.batch_size - 1) / options_.batch_size;
}

at::Tensor BatchPlan::next_pass() const {
  // Python's loader draws a seed for its workers here, whether it has any or
  // not; without this the numbers that follow would differ from Python's.
  draw_seed(options_.generator);

  const auto sampled = options_.sampler->next_pass();
  if (!sampled.defined() || !sampled.is_cpu() || sampled.dim() != 1 ||
      sampled.scalar_type() != at::kLong) {
    refuse("the sampler must return a 1-d int64 tensor on the CPU");
  }
  if (sampled.numel() != options_.sampler->size()) {
    refuse("the sampler announced " + std::to_string(options_.sampler->size()) +
           " indices, but returned " + std::to_string(sampled.numel()));
  }
  const auto order = sampled.contiguous();
  const auto* index = order.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < order.numel(); ++i) {
    if (index[i] < 0 || index[i] >= dataset_size_) {
      refuse("the sampler returned index " + std::to_string(index[i]) +
             ", but the data set has " + std::to_string(dataset_size_) +
             " items");
    }
  }

  if (!options_.drop_last) return order;
  return order.narrow(
      0, 0, order.numel() / options_.batch_size * options_.batch_size);
}

at::Tensor BatchPlan::batch_indices(const at::Tensor& pass,
                                    int64_t batch) const {
  const auto begin = batch * options_.batch_size;
  return pass.narrow(
      0, begin, std::min(options_.batch_size, pass.numel() - begin));
}

}  // namespace lockstep::data::detail
