#include "launch/cluster_environment.h"

#include <initializer_list>

#include "core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

constexpr int kMaxWorldSize = 1 << 20;

std::optional<int> number(std::initializer_list<const char*> names,
                          int minimum,
                          int maximum) {
  for (const char* name : names) {
    if (const auto value = env::get_int(name, minimum, maximum)) {
      return static_cast<int>(*value);
    }
  }
  return std::nullopt;
}

std::optional<int> rank_in(std::initializer_list<const char*> names) {
  return number(names, 0, kMaxWorldSize - 1);
}

std::optional<int> count_in(std::initializer_list<const char*> names) {
  return number(names, 1, kMaxWorldSize);
}

bool any_set(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (env::get(name)) return true;
  }
  return false;
}

ClusterEnvironment read_variables() {
  ClusterEnvironment result;
  result.source = "RANK and WORLD_SIZE";
  result.rank = rank_in({"RANK"});
  result.world_size = count_in({"WORLD_SIZE"});
  result.local_rank = rank_in({"LOCAL_RANK"});
  result.local_world_size = count_in({"LOCAL_WORLD_SIZE"});
  return result;
}

ClusterEnvironment read_slurm(const char* source) {
  ClusterEnvironment result;
  result.source = source;
  result.rank = rank_in({"SLURM_PROCID"});
  result.world_size = count_in({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  result.local_rank = rank_in({"SLURM_LOCALID"});
  result.several_hosts =
      count_in({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}).value_or(1) > 1;
  if (!result.several_hosts) result.local_world_size = result.world_size;
  const auto job = env::get("SLURM_JOB_ID");
  const auto step = env::get("SLURM_STEP_ID");
  if (job && step) result.job = "slurm-" + *job + '.' + *step;
  return result;
}

ClusterEnvironment read_mpi(const char* source) {
  ClusterEnvironment result;
  result.source = source;
  result.rank = rank_in({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"});
  result.world_size = count_in({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
  result.local_rank =
      rank_in({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"});
  result.local_world_size =
      count_in({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  result.several_hosts = result.local_world_size && result.world_size &&
                         *result.local_world_size < *result.world_size;
  if (const auto job = env::get("PMIX_NAMESPACE")) {
    result.job = "pmix-" + *job;
  }
  return result;
}

ClusterEnvironment read_starter() {
  if (any_set({"RANK", "WORLD_SIZE"})) return read_variables();
  const bool slurm = any_set({"SLURM_PROCID"});
  const bool open_mpi = any_set({"OMPI_COMM_WORLD_RANK"});
  if (slurm && any_set({"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"})) {
    auto step = read_slurm("Slurm step");
    if (!open_mpi) return step;
    auto mpi = read_mpi("Open MPI");
    return mpi.world_size > step.world_size ? mpi : step;
  }
  if (open_mpi) return read_mpi("Open MPI");
  if (any_set({"PMI_RANK", "PMIX_RANK"})) return read_mpi("PMI");
  if (slurm) return read_slurm("Slurm job");
  return {};
}

}  // namespace

ClusterEnvironment read_cluster_environment() {
  ClusterEnvironment result = read_starter();
  result.master_addr = env::get("MASTER_ADDR");
  result.master_port = number({"MASTER_PORT"}, 1, 65535);
  if (result.rank && result.world_size && *result.rank >= *result.world_size) {
    throw InvalidArgument(
        "rank " + std::to_string(*result.rank) + " is outside a world of " +
        std::to_string(*result.world_size) + " (from " + result.source +
        "); ranks count from 0 to the world size minus one");
  }
  return result;
}

}  // namespace lockstep::launcher
