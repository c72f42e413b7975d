// Trains a small network to read handwritten digits, on as many processes as
// the launcher starts. usage: digits [DATA_FOLDER [EPOCHS]]
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <charconv>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "idx.h"
#include "loss_plot.h"
#include "progress.h"

namespace nn = torch::nn;

namespace {

constexpr int kBatchSize = 32;

struct Digits {
  torch::Tensor images;
  torch::Tensor labels;
};

/// Images 0, 5, 10, ... are held out to measure the accuracy.
struct Split {
  Digits train;
  Digits held_out;
};

Split load(const std::string& folder) {
  const auto images = read_idx(folder + "/images.idx3-ubyte")
                          .to(torch::kFloat)
                          .div_(16)
                          .unsqueeze(1);
  const auto labels = read_idx(folder + "/labels.idx1-ubyte").to(torch::kLong);
  const auto held_out = torch::arange(labels.size(0)) % 5 == 0;
  return {{images.index({~held_out}), labels.index({~held_out})},
          {images.index({held_out}), labels.index({held_out})}};
}

nn::Sequential make_network() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)),
                        nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)),
                        nn::ReLU(),
                        nn::MaxPool2d(2),
                        nn::Flatten(),
                        nn::Linear(32 * 4 * 4, 64),
                        nn::ReLU(),
                        nn::Linear(64, 10));
}

/// The share of `digits` that the network reads right; each rank reads a part.
double accuracy(nn::Sequential& net, const Digits& digits) {
  torch::NoGradGuard no_grad;
  net->eval();
  const auto size = digits.labels.size(0);
  auto dataset = lockstep::data::TensorDataset(digits.images, digits.labels);
  auto sampler = lockstep::data::DistributedSampler(
      size, {.shuffle = false, .exact = true});
  auto loader = lockstep::data::DataLoader(
      dataset, {.batch_size = 256, .sampler = sampler});
  auto right = torch::zeros(1, torch::kLong);
  for (auto& [x, y] : loader) right += (net->forward(x).argmax(1) == y).sum();
  lockstep::all_reduce(right);
  return right.item<double>() / static_cast<double>(size);
}

void train(const std::string& folder, int epochs) {
  const bool speaks = lockstep::get_rank() == 0;
  const auto [train_set, held_out] = load(folder);
  torch::manual_seed(0);
  auto net = make_network();
  auto model = lockstep::DistributedDataParallel(net);
  torch::optim::Adam optimizer(model->parameters(), 2e-3);

  auto dataset =
      lockstep::data::TensorDataset(train_set.images, train_set.labels);
  auto sampler = lockstep::data::DistributedSampler(dataset.size());
  auto loader = lockstep::data::DataLoader(
      dataset, {.batch_size = kBatchSize, .sampler = sampler});

  const int64_t ranks = lockstep::get_world_size();
  Progress progress(epochs, sampler.size() * ranks);
  std::vector<double> losses;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    if (speaks) progress.begin_epoch();
    double sum = 0;
    for (auto& [x, y] : loader) {
      optimizer.zero_grad();
      auto loss = nn::functional::cross_entropy(model->forward(x), y);
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
      sum += losses.back();
      if (speaks) progress.step(x.size(0) * ranks, losses.back());
    }
    auto mean = torch::tensor(sum / static_cast<double>(loader.size()));
    lockstep::all_reduce(mean, {.op = lockstep::ReduceOp::AVG});
    if (speaks) progress.end_epoch(mean.item<double>());
  }

  const double share = accuracy(net, held_out);
  if (!speaks) return;
  lockstep::save(*net, "model.safetensors");
  write_loss_plot("loss.svg", losses, epochs);
  std::printf(
      "held-out accuracy %.4f on %d images, trained by %d processes\n"
      "saved model.safetensors and loss.svg\n",
      share,
      static_cast<int>(held_out.labels.size(0)),
      static_cast<int>(ranks));
}

/// A whole number from 1 on.
std::optional<int> parse_epochs(std::string_view text) {
  int epochs = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), epochs);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && epochs > 0 ? std::optional(epochs) : std::nullopt;
}

}  // namespace

int main(int argc, char** argv) {
  const auto epochs = parse_epochs(argc > 2 ? argv[2] : "12");
  if (!epochs || argc > 3) {
    std::fputs("usage: digits [DATA_FOLDER [EPOCHS]], EPOCHS from 1 on\n",
               stderr);
    return 2;
  }
  lockstep::init_process_group();
  train(argc > 1 ? argv[1] : "data/digits", *epochs);
  lockstep::destroy_process_group();
}
