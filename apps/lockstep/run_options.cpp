#include "run_options.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>

#include "launch/cpus.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr int kDefaultPort = 29500;

/// What each program of a job may say for itself.
struct ProgramOptions {
  std::string nproc = "1";
  bool no_python = false;
  bool module = false;
};

struct JobOptions {
  bool standalone = false;
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  std::string run_id;
  double grace = 30;
};

void add_program_options(CLI::App& app, ProgramOptions& options) {
  app.add_option("-n,--nproc-per-node,--nproc_per_node",
                 options.nproc,
                 "Workers on this node: a number, auto, cpu or gpu")
      ->envname("PET_NPROC_PER_NODE")
      ->capture_default_str();
  app.add_flag("--no-python,--no_python",
               options.no_python,
               "Execute the program itself, whatever its name ends in");
  app.add_flag("-m,--module",
               options.module,
               "The program is a Python module, as in python3 -m");
}

void add_job_options(CLI::App& app, JobOptions& options) {
  app.add_flag("--standalone",
               options.standalone,
               "One node and a free port (the default)");
  app.add_option("--nnodes", options.nnodes, "Nodes of the job")
      ->envname("PET_NNODES")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--node-rank,--node_rank",
                 options.node_rank,
                 "This node's number, from 0")
      ->envname("PET_NODE_RANK")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--master-addr,--master_addr",
                 options.master_addr,
                 "Address of node 0")
      ->envname("PET_MASTER_ADDR")
      ->capture_default_str();
  app.add_option("--master-port,--master_port",
                 options.master_port,
                 "Port of the store on node 0; without it a free one, with "
                 "several nodes 29500")
      ->envname("PET_MASTER_PORT")
      ->check(CLI::Range(0, 65535));
  app.add_option("--rdzv-id,--rdzv_id",
                 options.run_id,
                 "Name of the job, TORCHELASTIC_RUN_ID of its workers")
      ->envname("PET_RDZV_ID");
  app.add_option("--grace",
                 options.grace,
                 "Seconds between asking workers to stop and killing them")
      ->envname("LOCKSTEP_GRACE")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
}

std::vector<std::string> command_of(const ProgramOptions& options,
                                    std::vector<std::string> words) {
  const bool script = words.front().ends_with(".py");
  if (options.no_python || (!script && !options.module)) return words;
  const char* python = std::getenv("PYTHON_EXEC");
  std::vector<std::string> command = {python != nullptr ? python : "python3",
                                      "-u"};
  if (options.module) command.emplace_back("-m");
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

/// Parses the options before a program and returns the rest.
std::vector<std::string> parse_part(CLI::App& app,
                                    std::vector<std::string> part) {
  app.prefix_command();
  std::reverse(part.begin(), part.end());
  try {
    app.parse(part);
  } catch (const CLI::CallForHelp& help) {
    app.exit(help);
    throw;
  }
  std::vector<std::string> words = app.remaining();
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  if (words.empty()) {
    throw InvalidArgument(
        "no program is given: lockstep run [options] program [arguments]");
  }
  if (words.front().starts_with('-')) {
    throw InvalidArgument("unknown option " + words.front() +
                          "; lockstep run --help lists them");
  }
  return words;
}

}  // namespace

LaunchConfig parse_run_options(const std::vector<std::string>& arguments) {
  JobOptions job;
  LaunchConfig config;
  bool port_given = false;
  auto begin = arguments.begin();
  for (bool first = true;; first = false) {
    const auto end = std::find(begin, arguments.end(), ":");
    CLI::App app("Starts the workers of a job and watches over them.",
                 "lockstep run");
    app.footer("program [arguments] [: [-n N] program [arguments]]...");
    ProgramOptions program;
    add_program_options(app, program);
    if (first) add_job_options(app, job);
    const auto words = parse_part(app, {begin, end});
    if (first) port_given = app.count("--master-port") > 0;
    config.programs.push_back(
        {command_of(program, words), launcher::worker_count(program.nproc)});
    if (end == arguments.end()) break;
    begin = end + 1;
  }
  if (job.standalone && (job.nnodes > 1 || port_given)) {
    throw InvalidArgument(
        "--standalone is one node with a free port; leave it out to give "
        "--nnodes or --master-port");
  }
  config.nnodes = job.nnodes;
  config.node_rank = job.node_rank;
  config.master_addr = job.master_addr;
  config.master_port =
      job.nnodes > 1 && !port_given ? kDefaultPort : job.master_port;
  config.run_id = job.run_id;
  config.grace =
      std::chrono::milliseconds(static_cast<int64_t>(job.grace * 1000));
  return config;
}

}  // namespace lockstep
