#include "launch/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

namespace lockstep::launcher {
namespace {

constexpr std::array kSignals = {
    SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

std::atomic<int> relay_end{-1};
std::array<struct sigaction, kSignals.size()> previous;
std::array<bool, kSignals.size()> installed;

void relay(int signal) {
  const int error = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const ssize_t size = ::write(relay_end.load(), &byte, 1);
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == relay;
}

bool is_free(const struct sigaction& action, int signal, bool own_process) {
  if ((action.sa_flags & SA_SIGINFO) != 0) return false;
  return action.sa_handler == SIG_DFL ||
         (action.sa_handler == SIG_IGN && own_process && signal != SIGHUP);
}

}  // namespace

SignalRelay::SignalRelay(bool own_process) : pipe_(make_pipe(O_NONBLOCK)) {
  int none = -1;
  if (!relay_end.compare_exchange_strong(none, pipe_.write_end.get())) return;
  struct sigaction action = {};
  action.sa_handler = relay;
  action.sa_flags = SA_RESTART;
  ::sigfillset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &previous[i]);
    installed[i] = is_free(previous[i], kSignals[i], own_process);
    if (installed[i]) ::sigaction(kSignals[i], &action, nullptr);
  }
}

SignalRelay::~SignalRelay() {
  if (relay_end.load() != pipe_.write_end.get()) return;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction current = {};
    ::sigaction(kSignals[i], nullptr, &current);
    if (installed[i] && is_ours(current)) {
      ::sigaction(kSignals[i], &previous[i], nullptr);
    }
    installed[i] = false;
  }
  relay_end.store(-1);
}

std::optional<int> SignalRelay::next() {
  unsigned char byte = 0;
  if (::read(pipe_.read_end.get(), &byte, 1) != 1) return std::nullopt;
  return byte;
}

void reset_relayed_signals() noexcept {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (installed[i]) ::signal(kSignals[i], SIG_DFL);
  }
}

}  // namespace lockstep::launcher
