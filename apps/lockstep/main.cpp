#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <iostream>
#include <string>
#include <vector>

#include "commands.h"
#include "lockstep/core/error.h"
#include "lockstep/version.h"

namespace {

constexpr int kUsageError = 2;

constexpr const char* kUsage =
    "Usage: lockstep COMMAND ...\n"
    "  run [options] program [arguments]   start a job; run --help tells more\n"
    "  --version\n"
    "  --help\n";

/// Descriptors 0 to 2 exist, so that no pipe of ours gets one of them.
void open_standard_streams() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
  }
}

int execute(const std::vector<std::string>& arguments) {
  const std::string command = arguments.empty() ? "" : arguments.front();
  if (command == "run") {
    return lockstep::run_command({arguments.begin() + 1, arguments.end()});
  }
  if (command == "--version") {
    std::cout << "lockstep " LOCKSTEP_VERSION "\n";
    return 0;
  }
  if (command == "--help" || command == "-h") {
    std::cout << kUsage;
    return 0;
  }
  if (!command.empty()) {
    std::cerr << "lockstep: unknown command " << command << '\n';
  }
  std::cerr << kUsage;
  return kUsageError;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  std::signal(SIGCHLD, SIG_DFL);
  try {
    return execute({argv + 1, argv + argc});
  } catch (const CLI::CallForHelp&) {
    return 0;
  } catch (const CLI::ParseError& error) {
    std::cerr << "lockstep: " << error.what() << '\n';
    return kUsageError;
  } catch (const lockstep::InvalidArgument& error) {
    std::cerr << "lockstep: " << error.what() << '\n';
    return kUsageError;
  } catch (const lockstep::LaunchError& error) {
    std::cerr << "lockstep: " << error.what() << '\n';
    return error.exit_code();
  } catch (const std::exception& error) {
    std::cerr << "lockstep: " << error.what() << '\n';
    return 1;
  }
}
