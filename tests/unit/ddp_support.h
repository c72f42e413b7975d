#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

/// Models and data by formula, the same on every rank and in every run.
namespace lockstep::test {

inline const std::vector<std::string> kDdpBackends = {
    "shm",
#ifdef LOCKSTEP_HAS_GLOO
    "gloo",
#endif
};

inline at::Tensor formula(at::IntArrayRef sizes, double seed = 0) {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  const auto i = torch::arange(numel, torch::kDouble);
  return torch::sin(i * 0.37 + seed).to(torch::kFloat).view(sizes).contiguous();
}

inline torch::nn::Sequential mlp(int64_t in = 6, int64_t hidden = 5) {
  torch::nn::Sequential net(torch::nn::Linear(in, hidden),
                            torch::nn::Tanh(),
                            torch::nn::Linear(hidden, 3));
  const torch::NoGradGuard no_grad;
  double seed = 0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(formula(parameter.sizes(), ++seed) * 0.5);
  }
  return net;
}

/// Rank `rank`'s share of a batch of `rows` rows per rank.
inline at::Tensor share(const at::Tensor& batch, int rank, int64_t rows) {
  return batch.narrow(0, rank * rows, rows);
}

/// A loss whose mean over equal shares is the whole batch's.
inline at::Tensor loss_of(const at::Tensor& output) {
  return (output * output).mean();
}

inline std::vector<at::Tensor> gradients(
    const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters) {
    result.push_back(parameter.grad().clone());
  }
  return result;
}

template <class E, class Fn>
std::string message_of(const Fn& fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "the expected error was not thrown";
  return {};
}

}  // namespace lockstep::test
