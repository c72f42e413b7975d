#pragma once

#include <string>

namespace lockstep::launcher {

/// CPUs that this process may use: its affinity mask, bounded by the CPU quota
/// of its control groups (rounded down). At least 1.
int allowed_cpus();

/// The smallest CPU quota of the process's control groups in whole CPUs, at
/// least 1; INT_MAX without one. `root` is where proc/ and sys/ are.
int cpu_quota(const std::string& root = "/");

/// NVIDIA devices of this machine, as far as CUDA_VISIBLE_DEVICES shows them.
int visible_gpus();

/// The value of `--nproc-per-node`: a number, `cpu` (allowed CPUs), `gpu`
/// (visible GPUs) or `auto` (GPUs if there are any, else CPUs).
/// Throws InvalidArgument for anything else, and for `gpu` without one.
int worker_count(const std::string& text);

}  // namespace lockstep::launcher
