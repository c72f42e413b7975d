#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iomanip>
#include <iostream>

// 10240 points, each labelled with the index of its largest coordinate.
const auto inputs =
    torch::sin(torch::arange(102400, torch::kFloat)).reshape({10240, 10});
const auto labels = inputs.argmax(1);

void train(const lockstep::LaunchContext&) {
  lockstep::init_process_group();

  torch::manual_seed(0);
  auto net = torch::nn::Sequential(
      torch::nn::Linear(10, 50), torch::nn::ReLU(), torch::nn::Linear(50, 10));
  net->to(lockstep::device());
  auto model = lockstep::DistributedDataParallel(net);
  torch::optim::SGD optimizer(model->parameters(), 0.01);

  auto dataset = lockstep::data::TensorDataset(inputs, labels);
  auto sampler = lockstep::data::DistributedSampler(dataset.size());
  auto loader = lockstep::data::DataLoader(
      dataset, {.batch_size = 256, .sampler = sampler});

  double last_loss = 0;
  for (int epoch = 0; epoch < 5; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& [x, y] : loader) {
      optimizer.zero_grad();
      auto loss = torch::nn::functional::cross_entropy(model->forward(x), y);
      loss.backward();
      optimizer.step();
      last_loss = loss.item<double>();
    }
  }
  if (lockstep::get_rank() == 0) {
    lockstep::save(*net, "model.safetensors");
    std::cout << "final loss " << std::setprecision(8) << last_loss
              << std::endl;
  }
  lockstep::destroy_process_group();
}

int main() {
  return lockstep::spawn(train, {.nprocs = 4});
}
