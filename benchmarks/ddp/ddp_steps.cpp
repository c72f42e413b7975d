// One rank of the `ddp` benchmark: reads numbers of training steps from stdin,
// one a line, runs them and answers each with a line of JSON.
//
//   bench_ddp_steps CASE ddp|bare
//
// benchmarks/peers/ddp_steps.py does the same work in Python.

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <string>

namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

at::Tensor wave(at::IntArrayRef shape, double phase, double scale) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  const auto index = torch::arange(numel, torch::kDouble);
  return (torch::sin(index * 0.37 + phase) * scale)
      .to(torch::kFloat)
      .reshape(shape);
}

/// Parameters by formula, so that both languages start from the same bits.
void fill_parameters(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  double phase = 0;
  for (auto& parameter : module.parameters()) {
    const double fan_in = parameter.dim() > 1
                              ? static_cast<double>(parameter[0].numel())
                              : static_cast<double>(parameter.numel());
    parameter.copy_(wave(parameter.sizes(), phase, 1 / std::sqrt(fan_in)));
    phase += 1;
  }
}

nn::Sequential make_model(const std::string& name) {
  if (name == "linear-b256") return nn::Sequential(nn::Linear(10, 1));
  if (name == "cnn-b64") {
    return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 32, 3)),
                          nn::ReLU(),
                          nn::Conv2d(nn::Conv2dOptions(32, 64, 3)),
                          nn::ReLU(),
                          nn::MaxPool2d(2),
                          nn::Flatten(),
                          nn::Linear(9216, 128),
                          nn::ReLU(),
                          nn::Linear(128, 10));
  }
  if (name == "mlp21m-b32") {
    return nn::Sequential(nn::Linear(1024, 4096),
                          nn::ReLU(),
                          nn::Linear(4096, 4096),
                          nn::ReLU(),
                          nn::Linear(4096, 10));
  }
  return nn::Sequential(nn::Linear(10, 50), nn::ReLU(), nn::Linear(50, 10));
}

struct Batch {
  at::Tensor x;
  at::Tensor y;
};

Batch make_batch(const std::string& name, int rank) {
  const double phase = rank;
  if (name == "linear-b256") {
    return {wave({256, 10}, phase, 1), wave({256, 1}, phase + 0.5, 1)};
  }
  const auto labels = [rank](int64_t n) {
    return (torch::arange(n) * 7 + rank).remainder(10);
  };
  if (name == "cnn-b64") return {wave({64, 1, 28, 28}, phase, 1), labels(64)};
  if (name == "mlp21m-b32") return {wave({32, 1024}, phase, 1), labels(32)};
  return {wave({64, 10}, phase, 1), labels(64)};
}

/// Runs `steps` training steps and appends their losses.
using Round = std::function<void(int steps, std::vector<at::Tensor>& losses)>;

template <class Model>
Round fixed_batch(Model model,
                  std::shared_ptr<torch::optim::SGD> optimizer,
                  const std::string& name) {
  const auto batch = make_batch(name, lockstep::get_rank());
  const bool regression = name == "linear-b256";
  return [=](int steps, std::vector<at::Tensor>& losses) mutable {
    for (int i = 0; i < steps; ++i) {
      optimizer->zero_grad();
      const auto output = model->forward(batch.x);
      const auto loss = regression ? F::mse_loss(output, batch.y)
                                   : F::cross_entropy(output, batch.y);
      loss.backward();
      optimizer->step();
      losses.push_back(loss.detach());
    }
  };
}

/// The loop of a user's program: sampler, loader, epochs.
template <class Model>
Round whole_loop(Model model, std::shared_ptr<torch::optim::SGD> optimizer) {
  const int64_t items = 20480;
  auto dataset = std::make_shared<lockstep::data::TensorDataset<2>>(
      wave({items, 10}, 0, 1), (torch::arange(items) * 7).remainder(10));
  auto sampler = lockstep::data::DistributedSampler(items);
  auto epoch = std::make_shared<int>(0);
  return [=](int steps, std::vector<at::Tensor>& losses) mutable {
    auto loader = lockstep::data::DataLoader(
        *dataset, {.batch_size = 256, .sampler = sampler});
    for (int done = 0; done < steps;) {
      sampler.set_epoch((*epoch)++);
      for (auto& [x, y] : loader) {
        optimizer->zero_grad();
        const auto loss = F::cross_entropy(model->forward(x), y);
        loss.backward();
        optimizer->step();
        losses.push_back(loss.detach());
        ++done;
      }
    }
  };
}

template <class Model>
Round make_round(Model model, const std::string& name) {
  auto optimizer = std::make_shared<torch::optim::SGD>(
      model->parameters(), torch::optim::SGDOptions(0.01));
  if (name == "seed-loop") return whole_loop(model, optimizer);
  return fixed_batch(model, optimizer, name);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: bench_ddp_steps CASE ddp|bare\n");
    return 2;
  }
  const std::string name = argv[1];
  const bool wrapped = std::string(argv[2]) == "ddp";
  lockstep::init_process_group();
  auto model = make_model(name);
  fill_parameters(*model);
  const Round round =
      wrapped ? make_round(lockstep::DistributedDataParallel(model), name)
              : make_round(model, name);

  int steps = 0;
  while (std::cin >> steps) {
    std::vector<at::Tensor> losses;
    losses.reserve(steps);
    lockstep::barrier();
    const auto start = std::chrono::steady_clock::now();
    round(steps, losses);
    const std::chrono::duration<double, std::micro> took =
        std::chrono::steady_clock::now() - start;
    double checksum = 0;
    for (const auto& parameter : model->parameters()) {
      checksum += parameter.detach().abs().sum(torch::kDouble).item<double>();
    }
    std::printf(
        "{\"us_per_step\": %.3f, \"first_loss\": %.9g, \"last_loss\": %.9g, "
        "\"parameters\": %.12g}\n",
        took.count() / static_cast<double>(losses.size()),
        losses.front().item<double>(),
        losses.back().item<double>(),
        checksum);
    std::fflush(stdout);
  }
  lockstep::destroy_process_group();
  return 0;
}
