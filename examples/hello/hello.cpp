#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  torch::manual_seed(0);
  auto net = torch::nn::Linear(10, 1);
  auto model = lockstep::DistributedDataParallel(net);
  torch::optim::SGD optimizer(model->parameters(), 0.1);

  // Every rank learns from points of its own.
  auto x = torch::sin(torch::arange(1280).view({128, 10}) + rank);
  auto y = x.abs().sum(1, true);
  for (int step = 1; step <= 100; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    optimizer.step();
    if (step % 50 == 0 && rank == 0) {
      std::cout << "step " << step << " loss " << loss.item<float>()
                << std::endl;
    }
  }
  lockstep::destroy_process_group();
}
