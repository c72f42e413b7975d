// What a fragment of a document may use without saying so.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#define PRELUDE_VARIABLES                                                      \
  [[maybe_unused]] torch::Tensor tensor, [[maybe_unused]] torch::Tensor x,     \
      [[maybe_unused]] torch::Tensor y, [[maybe_unused]] torch::Tensor inputs, \
      [[maybe_unused]] torch::Tensor labels,                                   \
      [[maybe_unused]] torch::nn::Sequential net, [[maybe_unused]] int rank,   \
      [[maybe_unused]] int world_size
