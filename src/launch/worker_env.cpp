#include "launch/worker_env.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string_view>

namespace lockstep::launcher {

Environment own_environment() {
  Environment variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

Environment worker_environment(const Job& job,
                               int local_rank,
                               Environment base,
                               int cpus) {
  const std::string rank = std::to_string(job.rank(local_rank));
  const std::string world_size = std::to_string(job.world_size());
  base["RANK"] = rank;
  base["LOCAL_RANK"] = std::to_string(local_rank);
  base["WORLD_SIZE"] = world_size;
  base["LOCAL_WORLD_SIZE"] = std::to_string(job.local_world_size);
  base["GROUP_RANK"] = std::to_string(job.node_rank);
  base["GROUP_WORLD_SIZE"] = std::to_string(job.nnodes);
  base["ROLE_NAME"] = "default";
  base["ROLE_RANK"] = rank;
  base["ROLE_WORLD_SIZE"] = world_size;
  base["MASTER_ADDR"] = job.master_addr;
  base["MASTER_PORT"] = std::to_string(job.master_port);
  base["TORCHELASTIC_RUN_ID"] = job.run_id;
  base["TORCHELASTIC_RESTART_COUNT"] = "0";
  base["TORCHELASTIC_MAX_RESTARTS"] = "0";
  base["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  base["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  base.erase("TORCHELASTIC_ERROR_FILE");
  base.erase("LOCKSTEP_MASTER_FD");
  base.emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  std::string& threads = base["OMP_NUM_THREADS"];
  if (threads.empty()) {
    threads = std::to_string(std::max(1, cpus / job.local_world_size));
  }
  return base;
}

std::string random_run_id() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::random_device source;
  std::string id;
  for (int i = 0; i < 16; ++i) id += kDigits[source() % 16];
  return id;
}

}  // namespace lockstep::launcher
