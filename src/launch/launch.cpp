#include "lockstep/launch/launch.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <list>
#include <memory>

#include "core/host.h"
#include "launch/agent.h"
#include "launch/cpus.h"
#include "launch/output.h"
#include "launch/pipe.h"
#include "launch/port.h"
#include "launch/process.h"
#include "launch/worker_env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep {
namespace {

using namespace launcher;

void check(const LaunchConfig& config) {
  if (config.programs.empty()) {
    throw InvalidArgument("nothing to launch: no program is given");
  }
  for (const LaunchProgram& program : config.programs) {
    if (program.command.empty() || program.command.front().empty()) {
      throw InvalidArgument("nothing to launch: a part names no program");
    }
    if (program.nprocs < 1) {
      throw InvalidArgument("cannot launch " + program.command.front() + ' ' +
                            std::to_string(program.nprocs) +
                            " times; the number of workers starts at 1");
    }
  }
  if (config.nnodes < 1 || config.node_rank < 0 ||
      config.node_rank >= config.nnodes) {
    throw InvalidArgument(
        "node rank " + std::to_string(config.node_rank) + " of " +
        std::to_string(config.nnodes) +
        " nodes is not possible; node ranks go from 0 to the number of nodes "
        "minus 1");
  }
  const int lowest_port = config.nnodes > 1 ? 1 : 0;
  if (config.master_port < lowest_port || config.master_port > 65535) {
    throw InvalidArgument("master port " + std::to_string(config.master_port) +
                          " is not possible; several nodes need one from 1 to "
                          "65535, one node takes 0 for any");
  }
  if (config.grace.count() < 0) {
    throw InvalidArgument("the grace time cannot be negative");
  }
}

std::string prefix_of(int rank) {
  return "[rank " + std::to_string(rank) + "]: ";
}

/// A worker of rank 0 that draws a progress bar draws it for our terminal.
void describe_terminal(Environment& variables, size_t prefix_size) {
  if (::isatty(STDOUT_FILENO) == 0) return;
  variables["LOCKSTEP_PROGRESS"] = "1";
  winsize size = {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 &&
      size.ws_col > prefix_size) {
    variables["COLUMNS"] = std::to_string(size.ws_col - prefix_size);
  }
}

/// The first failure in time, then what came after it.
std::string report(const Job& job,
                   const Outcome& outcome,
                   const std::deque<std::string>& last_lines) {
  const WorkerExit& first = outcome.exits[*outcome.failure];
  std::string text = "rank " + std::to_string(job.rank(first.local_rank)) +
                     " failed first: " + describe(first) + " (local rank " +
                     std::to_string(first.local_rank) + ", pid " +
                     std::to_string(first.pid) + ", host " + host_name() + ")";
  if (!last_lines.empty()) text += "\n  its last lines on stderr:";
  for (const std::string& line : last_lines) text += "\n    " + line;
  if (*outcome.failure + 1 < outcome.exits.size()) text += "\n  after it:";
  for (size_t i = *outcome.failure + 1; i < outcome.exits.size(); ++i) {
    const WorkerExit& exit = outcome.exits[i];
    text += "\n    rank " + std::to_string(job.rank(exit.local_rank)) + ": " +
            describe(exit);
  }
  return text;
}

}  // namespace

LaunchResult launch(const LaunchConfig& config) {
  check(config);
  Job job = {.nnodes = config.nnodes,
             .node_rank = config.node_rank,
             .local_world_size = 0,
             .master_addr = config.master_addr,
             .run_id = config.run_id.empty() ? random_run_id() : config.run_id};
  std::vector<std::string> paths;
  for (const LaunchProgram& program : config.programs) {
    paths.push_back(find_program(program.command.front()));
    job.local_world_size += program.nprocs;
  }
  ReservedPort port;
  if (config.node_rank == 0) {
    port = reserve_port(config.master_addr, config.master_port);
  }
  job.master_port = port.socket ? port.port : config.master_port;

  const int cpus = allowed_cpus();
  const Environment base = own_environment();
  const bool stdin_is_terminal = ::isatty(STDIN_FILENO) == 1;
  const Fd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  Sink out(STDOUT_FILENO);
  Sink err(STDERR_FILENO);
  std::list<LineSplitter> lines;
  std::vector<const LineSplitter*> errors;

  Agent agent(job.local_world_size, {.grace = config.grace});
  agent.write(out);
  agent.write(err);
  const auto relay = [&](Fd fd, Sink& sink, const std::string& prefix) {
    LineSplitter& splitter = lines.emplace_back(sink, prefix);
    agent.read(
        std::move(fd),
        [&splitter](std::string_view bytes) {
          bytes.empty() ? splitter.finish() : splitter.add(bytes);
        },
        &sink);
    return &splitter;
  };

  int local_rank = 0;
  for (size_t part = 0; part < config.programs.size(); ++part) {
    for (int i = 0; i < config.programs[part].nprocs; ++i, ++local_rank) {
      const int rank = job.rank(local_rank);
      const std::string prefix =
          job.world_size() > 1 ? prefix_of(rank) : std::string();
      Pipe to_out = make_pipe();
      Pipe to_err = make_pipe();
      ProcessSpec spec = {
          .path = paths[part],
          .argv = config.programs[part].command,
          .environment = worker_environment(job, local_rank, base, cpus),
          .in = rank == 0 && !stdin_is_terminal ? STDIN_FILENO : nothing.get(),
          .out = to_out.write_end.get(),
          .err = to_err.write_end.get()};
      if (rank == 0) {
        pass_on(port, spec);
        describe_terminal(spec.environment, prefix.size());
      }
      agent.start(spec);
      relay(std::move(to_out.read_end), out, prefix);
      errors.push_back(relay(std::move(to_err.read_end), err, prefix));
    }
  }
  log::info("started " + std::to_string(job.local_world_size) + " workers, " +
            "threads per worker: " +
            worker_environment(job, 0, base, cpus)["OMP_NUM_THREADS"]);

  const Outcome outcome = agent.run();
  if (outcome.failure) {
    const WorkerExit& first = outcome.exits[*outcome.failure];
    const auto index = static_cast<size_t>(first.local_rank);
    throw LaunchError(report(job, outcome, errors[index]->tail()),
                      {.peers = {job.rank(first.local_rank)}},
                      first.exit_code);
  }
  return {.exit_codes = outcome.exit_codes(), .signal = outcome.signal};
}

}  // namespace lockstep
