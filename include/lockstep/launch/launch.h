#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/core/export.h"

namespace lockstep {

/// One program of a job and how many workers of it run on this node.
struct LaunchProgram {
  /// The program and its arguments. A name without a slash is looked up in
  /// PATH.
  std::vector<std::string> command;
  int nprocs = 1;
};

/// A job as `launch` starts it. Mirrors `torchrun`'s options.
struct LaunchConfig {
  /// Local ranks are given in the order of the programs.
  std::vector<LaunchProgram> programs;
  /// Nodes of the job. Each runs its own launcher with the same number of
  /// workers and its own `node_rank`.
  int nnodes = 1;
  int node_rank = 0;
  /// Where rank 0's store is reached. It is an address of node 0.
  std::string master_addr = "127.0.0.1";
  /// 0: a free port that the kernel picks (one node only).
  int master_port = 0;
  /// TORCHELASTIC_RUN_ID of the workers. Empty: random.
  std::string run_id = {};
  /// Time between asking workers to stop and killing them.
  std::chrono::milliseconds grace = std::chrono::seconds(30);
};

/// How a job ended that did not fail.
struct LaunchResult {
  /// By local rank: the exit code, or 128 + signal number.
  std::vector<int> exit_codes;
  /// The signal to this process that stopped the job, SIGPIPE when the reader
  /// of its output left; 0: the workers ended by themselves, all with 0.
  int signal = 0;
};

/// Starts all workers of this node and blocks until the last of them and of
/// their child processes is gone.
///
/// Every worker leads a process group of its own and gets torchrun's
/// environment variables. Its output comes out line by line, prefixed by
/// `[rank N]: ` where the world has more than one rank. When one fails, the
/// others get SIGTERM and, after `grace`, SIGKILL. While it runs, SIGINT,
/// SIGTERM, SIGHUP and SIGQUIT to this process stop the workers in the same
/// way, a second SIGINT kills them, SIGUSR1 and SIGUSR2 are passed on; a signal
/// that the program handles itself is left to it. When this process dies, even
/// by SIGKILL, the workers and their children are killed.
///
/// \throws InvalidArgument  a count, rank, address or port that is not
/// possible,
///     or SIGCHLD is ignored
/// \throws LaunchError  a program cannot be started (`exit_code()` 127 not
///     found, 126 not executable), the port is taken, or a worker failed: the
///     text tells of the first failure in time, its last lines on stderr, and
///     then the others; `exit_code()` is the first one's own or 128 + signal
///
/// Thread safety: any thread; it must outlive the call. One call at a time
/// handles signals. Mirrors `torch.distributed.launcher.api.elastic_launch`.
LOCKSTEP_API LaunchResult launch(const LaunchConfig& config);

}  // namespace lockstep
