#include "launch/cluster_environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

using Variables = std::map<std::string, std::string>;

constexpr const char* kAll[] = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
};

ClusterEnvironment read(const Variables& variables) {
  for (const char* name : kAll) ::unsetenv(name);
  for (const auto& [name, value] : variables) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  return read_cluster_environment();
}

struct Case {
  const char* name;
  Variables variables;
  const char* source;
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<int> local_rank = {};
  std::optional<int> local_world_size = {};
  const char* job = "";
  bool several_hosts = false;
};

const std::vector<Case> kCases = {
    {"nothing", {}, "none", {}, {}},
    {"torchrun",
     {{"RANK", "3"},
      {"WORLD_SIZE", "4"},
      {"LOCAL_RANK", "1"},
      {"LOCAL_WORLD_SIZE", "2"}},
     "RANK and WORLD_SIZE",
     3,
     4,
     1,
     2},
    {"rank alone is kept as it is",
     {{"RANK", "3"}},
     "RANK and WORLD_SIZE",
     3,
     {}},
    {"variables of our own kind win over a Slurm step and Open MPI",
     {{"RANK", "1"},
      {"WORLD_SIZE", "2"},
      {"SLURM_PROCID", "7"},
      {"SLURM_STEP_ID", "0"},
      {"SLURM_NTASKS", "8"},
      {"OMPI_COMM_WORLD_RANK", "2"},
      {"OMPI_COMM_WORLD_SIZE", "3"}},
     "RANK and WORLD_SIZE",
     1,
     2},
    {"Slurm step on one host",
     {{"SLURM_PROCID", "1"},
      {"SLURM_NTASKS", "2"},
      {"SLURM_NNODES", "1"},
      {"SLURM_LOCALID", "1"},
      {"SLURM_JOB_ID", "17"},
      {"SLURM_STEP_ID", "3"}},
     "Slurm step",
     1,
     2,
     1,
     2,
     "slurm-17.3"},
    {"a step counts its own tasks and hosts, not the job's",
     {{"SLURM_PROCID", "1"},
      {"SLURM_NTASKS", "16"},
      {"SLURM_STEP_NUM_TASKS", "2"},
      {"SLURM_NNODES", "4"},
      {"SLURM_STEP_NUM_NODES", "2"},
      {"SLURM_LOCALID", "0"},
      {"SLURM_JOB_ID", "17"},
      {"SLURM_STEP_ID", "3"}},
     "Slurm step",
     1,
     2,
     0,
     {},
     "slurm-17.3",
     true},
    {"Slurm step before Open MPI",
     {{"SLURM_PROCID", "5"},
      {"SLURM_STEP_NUM_TASKS", "8"},
      {"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "2"}},
     "Slurm step",
     5,
     8,
     {},
     8},
    {"a step that only started mpirun's daemons",
     {{"SLURM_PROCID", "0"},
      {"SLURM_STEP_ID", "0"},
      {"SLURM_STEP_NUM_TASKS", "1"},
      {"OMPI_COMM_WORLD_RANK", "3"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"PMIX_NAMESPACE", "99"}},
     "Open MPI",
     3,
     4,
     1,
     2,
     "pmix-99",
     true},
    {"mpirun inside a Slurm batch script",
     {{"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "4"},
      {"SLURM_JOB_ID", "17"},
      {"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "2"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
     "Open MPI",
     1,
     2,
     1,
     2},
    {"a Slurm batch script itself",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "17"}},
     "Slurm job",
     0,
     4,
     {},
     4},
    {"PMI of MPICH and Intel MPI",
     {{"PMI_RANK", "1"},
      {"PMI_SIZE", "2"},
      {"MPI_LOCALRANKID", "1"},
      {"MPI_LOCALNRANKS", "2"}},
     "PMI",
     1,
     2,
     1,
     2},
    {"PMIx tells the rank alone", {{"PMIX_RANK", "1"}}, "PMI", 1, {}},
    {"the size of a batch job is no rank",
     {{"SLURM_NTASKS", "4"}},
     "none",
     {},
     {}},
    {"empty is the same as unset",
     {{"RANK", ""}, {"WORLD_SIZE", ""}},
     "none",
     {},
     {}},
};

TEST(ClusterEnvironment, Table) {
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const auto found = read(c.variables);
    EXPECT_EQ(found.source, c.source);
    EXPECT_EQ(found.rank, c.rank);
    EXPECT_EQ(found.world_size, c.world_size);
    EXPECT_EQ(found.local_rank, c.local_rank);
    EXPECT_EQ(found.local_world_size, c.local_world_size);
    EXPECT_EQ(found.job, c.job);
    EXPECT_EQ(found.several_hosts, c.several_hosts);
    EXPECT_EQ(found.master_addr, std::nullopt);
    EXPECT_EQ(found.master_port, std::nullopt);
  }
}

TEST(ClusterEnvironment, MasterOfAcceleratesMpiPath) {
  const auto found = read({{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", "29500"}});
  EXPECT_EQ(found.source, "Open MPI");
  EXPECT_EQ(found.rank, 1);
  EXPECT_EQ(found.master_addr, "127.0.0.1");
  EXPECT_EQ(found.master_port, 29500);
}

TEST(ClusterEnvironment, BadValuesNameTheVariable) {
  const std::vector<std::pair<Variables, std::string>> cases = {
      {{{"RANK", "0"}, {"WORLD_SIZE", "NaN"}}, "WORLD_SIZE=\"NaN\""},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2.0"}}, "WORLD_SIZE=\"2.0\""},
      {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE=\"0\""},
      {{{"RANK", "0"}, {"WORLD_SIZE", "99999999999999999999"}}, "WORLD_SIZE="},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK=\"-1\""},
      {{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "rank 2 is outside a world of 2"},
      {{{"RANK", "one"}, {"WORLD_SIZE", "2"}}, "RANK=\"one\""},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "x"}},
       "LOCAL_RANK=\"x\""},
      {{{"MASTER_PORT", "0"}}, "MASTER_PORT=\"0\""},
      {{{"MASTER_PORT", "65536"}}, "MASTER_PORT=\"65536\""},
      {{{"SLURM_PROCID", "4"}, {"SLURM_STEP_NUM_TASKS", "4"}},
       "rank 4 is outside a world of 4 (from Slurm step)"},
      {{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "-2"}},
       "OMPI_COMM_WORLD_SIZE=\"-2\""},
  };
  for (const auto& [variables, expected] : cases) {
    SCOPED_TRACE(expected);
    try {
      (void)read(variables);
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(expected), std::string::npos)
          << e.what();
    }
  }
}

}  // namespace
}  // namespace lockstep::launcher
