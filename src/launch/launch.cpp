#include "lockstep/launch/launch.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <system_error>
#include <utility>

#include "core/host.h"
#include "launch/agent.h"
#include "launch/cpus.h"
#include "launch/launch_as.h"
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
  if (config.nnodes > 1) refuse_loopback_name(config.master_addr);
  need_exit_statuses();
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

std::vector<std::string> find_programs(
    const std::vector<LaunchProgram>& programs) {
  std::vector<std::string> paths;
  for (const LaunchProgram& program : programs) {
    paths.push_back(find_program(program.command.front()));
  }
  return paths;
}

Job job_of(const LaunchConfig& config, const ReservedPort& port) {
  Job job = {.nnodes = config.nnodes,
             .node_rank = config.node_rank,
             .local_world_size = 0,
             .master_addr = config.master_addr,
             .master_port = port.socket ? port.port : config.master_port,
             .run_id = config.run_id.empty() ? random_run_id() : config.run_id};
  for (const LaunchProgram& program : config.programs) {
    job.local_world_size += program.nprocs;
  }
  return job;
}

/// The workers of this node, from their start to their end.
class NodeRun {
 public:
  NodeRun(const LaunchConfig& config, bool own_process)
      : paths_(find_programs(config.programs)),
        port_(config.node_rank == 0
                  ? reserve_port(config.master_addr, config.master_port)
                  : ReservedPort()),
        job_(job_of(config, port_)),
        agent_(job_.local_world_size,
               {.own_process = own_process, .grace = config.grace}) {
    agent_.write(out_);
    agent_.write(err_);
    for (size_t part = 0; part < paths_.size(); ++part) {
      const LaunchProgram& program = config.programs[part];
      for (int i = 0; i < program.nprocs; ++i) {
        start(paths_[part], program.command);
      }
    }
    log::info("started " + std::to_string(job_.local_world_size) +
              " workers on " + std::to_string(cpus_) + " CPUs");
  }

  LaunchResult operator()() {
    const Outcome outcome = agent_.run();
    if (outcome.failure) {
      const WorkerExit& first = outcome.exits[*outcome.failure];
      throw LaunchError(report(outcome),
                        {.peers = {job_.rank(first.local_rank)}},
                        first.exit_code);
    }
    for (const Sink* sink : {&out_, &err_}) {
      if (sink->error() != 0 && sink->error() != EPIPE) {
        throw LaunchError(
            "the workers' output was lost: cannot write standard " +
            std::string(sink == &out_ ? "output" : "error") + ": " +
            std::generic_category().message(sink->error()));
      }
    }
    return {.exit_codes = outcome.exit_codes(), .signal = outcome.signal};
  }

 private:
  struct Worker {
    LineSplitter out;
    LineSplitter err;
  };

  /// Starts the next local rank.
  void start(const std::string& path, const std::vector<std::string>& command) {
    const int local_rank = static_cast<int>(workers_.size());
    const int rank = job_.rank(local_rank);
    const std::string prefix =
        job_.world_size() > 1 ? "[rank " + std::to_string(rank) + "]: " : "";
    Worker& worker = workers_.emplace_back(
        Worker{LineSplitter(out_, prefix), LineSplitter(err_, prefix)});
    Pipe out = make_pipe();
    Pipe err = make_pipe();
    ProcessSpec spec = {
        .path = path,
        .argv = command,
        .environment = worker_environment(job_, local_rank, base_, cpus_),
        .in = rank == 0 && !stdin_is_terminal_ ? STDIN_FILENO : nothing_.get(),
        .out = out.write_end.get(),
        .err = err.write_end.get()};
    if (rank == 0) {
      pass_on(port_, spec);
      describe_terminal(spec.environment, prefix.size());
    }
    agent_.start(std::move(spec));
    relay(std::move(out.read_end), worker.out, out_);
    relay(std::move(err.read_end), worker.err, err_);
  }

  void relay(Fd fd, LineSplitter& lines, const Sink& sink) {
    agent_.read(
        std::move(fd),
        [&lines](std::string_view bytes) {
          bytes.empty() ? lines.finish() : lines.add(bytes);
        },
        &sink);
  }

  /// The first failure in time, then how the others ended.
  std::string report(const Outcome& outcome) const {
    const WorkerExit& first = outcome.exits[*outcome.failure];
    const Worker& worker = workers_[static_cast<size_t>(first.local_rank)];
    std::string text = "rank " + std::to_string(job_.rank(first.local_rank)) +
                       " failed first: " + describe(first) + " (local rank " +
                       std::to_string(first.local_rank) + ", pid " +
                       std::to_string(first.pid) + ", host " + host_name() +
                       ")";
    if (!first.error.message.empty()) {
      text += "\n  its error: " + first.error.message;
    }
    const auto& last_lines = worker.err.tail();
    if (!last_lines.empty()) text += "\n  its last lines on stderr:";
    for (const std::string& line : last_lines) text += "\n    " + line;
    if (*outcome.failure + 1 < outcome.exits.size()) text += "\n  after it:";
    for (size_t i = *outcome.failure + 1; i < outcome.exits.size(); ++i) {
      const WorkerExit& exit = outcome.exits[i];
      text += "\n    rank " + std::to_string(job_.rank(exit.local_rank)) +
              ": " + describe(exit);
    }
    return text;
  }

  std::vector<std::string> paths_;
  ReservedPort port_;
  Job job_;
  int cpus_ = allowed_cpus();
  Environment base_ = own_environment();
  bool stdin_is_terminal_ = ::isatty(STDIN_FILENO) == 1;
  Fd nothing_{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  Sink out_{STDOUT_FILENO};
  Sink err_{STDERR_FILENO};
  std::deque<Worker> workers_;  ///< by local rank; the agent holds references
  Agent agent_;
};

}  // namespace

LaunchResult launch(const LaunchConfig& config) {
  return launcher::launch(config, false);
}

LaunchResult launcher::launch(const LaunchConfig& config, bool own_process) {
  check(config);
  return NodeRun(config, own_process)();
}

}  // namespace lockstep
