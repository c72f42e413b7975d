// The command line of `lockstep run`.
#include "run_options.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "launch/cpus.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Words = std::vector<std::string>;

TEST(RunOptions, DefaultsAreOneWorkerOnOneNode) {
  const auto config = parse_run_options({"./program", "-n", "--grace"});
  ASSERT_EQ(config.programs.size(), 1u);
  EXPECT_EQ(config.programs[0].command, (Words{"./program", "-n", "--grace"}));
  EXPECT_EQ(config.programs[0].nprocs, 1);
  EXPECT_EQ(config.nnodes, 1);
  EXPECT_EQ(config.master_port, 0);
  EXPECT_EQ(config.grace, std::chrono::seconds(30));
}

TEST(RunOptions, BothSpellingsOfTorchrunAreTaken) {
  for (const Words& words :
       {Words{"--nproc-per-node=2", "--node-rank=1", "--master-addr=h"},
        Words{
            "--nproc_per_node", "2", "--node_rank", "1", "--master_addr", "h"},
        Words{"-n", "2", "--node-rank", "1", "--master_addr=h"}}) {
    Words all = {"--nnodes", "2", "--master_port", "1234"};
    all.insert(all.end(), words.begin(), words.end());
    all.emplace_back("./program");
    const auto config = parse_run_options(all);
    EXPECT_EQ(config.programs[0].nprocs, 2);
    EXPECT_EQ(config.nnodes, 2);
    EXPECT_EQ(config.node_rank, 1);
    EXPECT_EQ(config.master_addr, "h");
    EXPECT_EQ(config.master_port, 1234);
  }
}

TEST(RunOptions, SeveralNodesHaveTorchrunsPort) {
  EXPECT_EQ(parse_run_options({"--nnodes", "2", "x"}).master_port, 29500);
  EXPECT_EQ(parse_run_options({"--standalone", "x"}).master_port, 0);
}

TEST(RunOptions, ScriptsAndModulesRunUnderPython) {
  const auto command = [](const Words& words) {
    return parse_run_options(words).programs[0].command;
  };
  EXPECT_EQ(command({"a.py", "b"}), (Words{"python3", "-u", "a.py", "b"}));
  EXPECT_EQ(command({"--no-python", "a.py"}), Words{"a.py"});
  EXPECT_EQ(command({"-m", "pkg.train", "b"}),
            (Words{"python3", "-u", "-m", "pkg.train", "b"}));
  ::setenv("PYTHON_EXEC", "/opt/python", 1);
  EXPECT_EQ(command({"a.py"}), (Words{"/opt/python", "-u", "a.py"}));
  ::unsetenv("PYTHON_EXEC");
}

TEST(RunOptions, AColonBeginsAnotherProgram) {
  const auto config = parse_run_options({"--grace",
                                         "1.5",
                                         "-n",
                                         "1",
                                         "./a",
                                         "x",
                                         ":",
                                         "-n",
                                         "3",
                                         "b.py",
                                         ":",
                                         "--",
                                         "./c"});
  ASSERT_EQ(config.programs.size(), 3u);
  EXPECT_EQ(config.programs[0].command, (Words{"./a", "x"}));
  EXPECT_EQ(config.programs[1].command, (Words{"python3", "-u", "b.py"}));
  EXPECT_EQ(config.programs[1].nprocs, 3);
  EXPECT_EQ(config.programs[2].command, Words{"./c"});
  EXPECT_EQ(config.grace, std::chrono::milliseconds(1500));
}

TEST(RunOptions, TheEnvironmentGivesDefaults) {
  ::setenv("LOCKSTEP_GRACE", "7", 1);
  ::setenv("PET_NPROC_PER_NODE", "cpu", 1);
  const auto config = parse_run_options({"./program"});
  EXPECT_EQ(config.grace, std::chrono::seconds(7));
  EXPECT_EQ(config.programs[0].nprocs, launcher::allowed_cpus());
  EXPECT_EQ(parse_run_options({"--grace", "1", "x"}).grace,
            std::chrono::seconds(1));
  ::setenv("LOCKSTEP_GRACE", "soon", 1);
  EXPECT_THROW(parse_run_options({"./program"}), CLI::ParseError);
  ::unsetenv("LOCKSTEP_GRACE");
  ::unsetenv("PET_NPROC_PER_NODE");
}

TEST(RunOptions, WrongOnesAreRefused) {
  for (const Words& words : {Words{},
                             Words{"-n", "2"},
                             Words{"--unknown", "./program"},
                             Words{"-n", "none", "./program"},
                             Words{"--standalone", "--master-port", "1", "x"},
                             Words{"./a", ":"},
                             Words{"./a", ":", "--nnodes", "2", "./b"}}) {
    EXPECT_THROW(parse_run_options(words), InvalidArgument);
  }
  for (const Words& words : {Words{"--nnodes", "0", "x"},
                             Words{"--master-port", "65536", "x"},
                             Words{"--grace", "-1", "x"}}) {
    EXPECT_THROW(parse_run_options(words), CLI::ParseError);
  }
}

}  // namespace
}  // namespace lockstep
