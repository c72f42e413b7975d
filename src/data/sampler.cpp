#include "lockstep/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randperm.h>

#include "data/random.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

int64_t checked_size(int64_t size) {
  if (size < 0) {
    throw InvalidArgument("the number of items must not be negative, but is " +
                          std::to_string(size));
  }
  return size;
}

}  // namespace

at::Generator make_generator(int64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
}

int64_t draw_seed(const std::optional<at::Generator>& generator) {
  return at::empty({}, at::kLong).random_(generator).item<int64_t>();
}

Sampler::~Sampler() = default;

SequentialSampler::SequentialSampler(int64_t size) : size_(checked_size(size)) {
}

SequentialSampler::~SequentialSampler() = default;

at::Tensor SequentialSampler::next_pass() {
  return at::arange(size_, at::TensorOptions(at::kLong).device(at::kCPU));
}

RandomSampler::RandomSampler(int64_t size, RandomSamplerOptions options)
    : items_(checked_size(size)),
      num_samples_(options.num_samples.value_or(size)),
      replacement_(options.replacement),
      generator_(std::move(options.generator)) {
  if (num_samples_ <= 0 || items_ == 0) {
    throw InvalidArgument(
        "RandomSampler needs at least one item and a positive "
        "num_samples, but has " +
        std::to_string(items_) + " items and num_samples " +
        std::to_string(num_samples_));
  }
}

RandomSampler::~RandomSampler() = default;

at::Tensor RandomSampler::next_pass() {
  const auto generator =
      generator_ ? *generator_ : make_generator(draw_seed(std::nullopt));
  const auto options = at::TensorOptions(at::kLong).device(at::kCPU);
  if (replacement_) {
    return at::randint(items_, {num_samples_}, generator, options);
  }
  std::vector<at::Tensor> orders;
  int64_t left = num_samples_;
  for (; left >= items_; left -= items_) {
    orders.push_back(at::randperm(items_, generator, options));
  }
  // Python draws this order even when nothing is left; the next pass of a
  // given generator depends on it.
  if (left > 0 || generator_) {
    orders.push_back(
        at::randperm(items_, generator, options).narrow(0, 0, left));
  }
  return at::cat(orders);
}

}  // namespace lockstep::data
