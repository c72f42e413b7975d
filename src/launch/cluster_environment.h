#pragma once

#include <optional>
#include <string>

namespace lockstep::launcher {

/// What the environment says about this process's place in a job. Nothing is
/// filled in: what no variable tells is empty.
struct ClusterEnvironment {
  /// Who started the job: "RANK and WORLD_SIZE" (torchrun, lockstep run, a
  /// hand), "Slurm step", "Open MPI", "PMI", "Slurm job" or "none".
  std::string source = "none";
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
  /// The same in all processes of the job and in no other job of this host;
  /// empty when the starter gives no such name.
  std::string job;
  /// Whether the starter says that ranks run on more than one host.
  bool several_hosts = false;
};

/// Reads the variables. RANK and WORLD_SIZE win over those of a Slurm step,
/// these over Open MPI's and PMI's, and those of a Slurm job, which its batch
/// script has too, come last. A step with fewer tasks than Open MPI has ranks
/// only started mpirun's daemons: then Open MPI's count.
/// Throws InvalidArgument that names a variable with a bad value, and for a
/// rank outside its world.
ClusterEnvironment read_cluster_environment();

}  // namespace lockstep::launcher
