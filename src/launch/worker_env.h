#pragma once

#include <map>
#include <string>
#include <vector>

namespace lockstep::launcher {

using Environment = std::map<std::string, std::string>;

/// What the workers of one node have in common.
struct Job {
  int nnodes = 1;
  int node_rank = 0;
  int local_world_size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::string run_id = {};

  [[nodiscard]] int world_size() const { return nnodes * local_world_size; }
  [[nodiscard]] int rank(int local_rank) const {
    return node_rank * local_world_size + local_rank;
  }
};

/// This process's environment. Later entries of a repeated name are dropped,
/// as getenv does.
Environment own_environment();

/// `base` with torchrun's variables for one worker, and without what an outer
/// launcher set. Values of OMP_NUM_THREADS and TORCH_NCCL_ASYNC_ERROR_HANDLING
/// that `base` has stay. `cpus` is the number of CPUs that the workers share.
Environment worker_environment(const Job& job,
                               int local_rank,
                               Environment base,
                               int cpus);

/// 16 random hexadecimal digits.
std::string random_run_id();

}  // namespace lockstep::launcher
