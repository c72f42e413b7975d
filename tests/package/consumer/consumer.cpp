#include <ATen/ATen.h>
#include <lockstep/distributed/collectives.h>
#include <lockstep/distributed/process_group.h>

#include <iostream>

int main() {
  lockstep::init_process_group();
  auto sum = at::full({1}, lockstep::get_rank() + 1);
  lockstep::all_reduce(sum);
  std::cout << "sum " << sum.item<int>() << std::endl;
  lockstep::destroy_process_group();
}
