#include "comm/backends/mpi/module/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

namespace lockstep::comm::mpi {
namespace {

constexpr std::chrono::milliseconds kPatience(20);
constexpr std::chrono::seconds kLongestFinalize(5);

std::timed_mutex mutex;
std::atomic<bool> given_up{false};
std::atomic<bool> one_may_be_stopped{false};
pid_t owner = 0;

void check_given_up() {
  if (!given_up) return;
  throw std::runtime_error(
      "a process of the group died or failed, or a message was half received, "
      "so this process cannot use MPI again; start the job anew");
}

bool says(int (*question)(int*)) {
  int answer = 0;
  question(&answer);
  return answer != 0;
}

/// Waits for the other processes, as MPI wants it; for a bounded time where one
/// may never come.
void finalize() {
  if (given_up || ::getpid() != owner || says(MPI_Finalized)) return;
  const auto finalize_in_turn = [] {
    try {
      const Turn turn = await_turn();
      MPI_Finalize();
    } catch (const std::exception&) {
      // Another thread has given MPI up meanwhile.
    }
  };
  if (!one_may_be_stopped) return finalize_in_turn();
  auto done = std::make_shared<std::promise<void>>();
  auto finalized = done->get_future();
  std::thread([done, finalize_in_turn] {
    finalize_in_turn();
    done->set_value();
  }).detach();
  finalized.wait_for(kLongestFinalize);
}

const char* name_of(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    default:
      return "MPI_THREAD_SERIALIZED";
  }
}

void check_level(int level, const std::string& remedy) {
  if (level >= MPI_THREAD_SERIALIZED) return;
  throw std::invalid_argument(
      std::string("MPI was initialised with ") + name_of(level) +
      ", and MPI_THREAD_SERIALIZED is needed; " + remedy);
}

void initialize() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level),
        "MPI_Init_thread");
  owner = ::getpid();
  std::atexit(finalize);
  check_level(level, "use an MPI that was built with threads");
}

}  // namespace

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(std::string(call) + " failed: " + text);
}

Turn::Turn() {
  check_given_up();
  lock_ = std::unique_lock(mutex, kPatience);
  check_given_up();
  if (says(MPI_Finalized)) {
    throw std::runtime_error(
        "the program has called MPI_Finalize, after which no group can use "
        "MPI; "
        "call destroy_process_group before it");
  }
}

Turn await_turn() {
  for (;;) {
    Turn turn;
    if (turn) return turn;
  }
}

World start() {
  const Turn turn = await_turn();
  if (says(MPI_Initialized)) {
    int level = MPI_THREAD_SINGLE;
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    check_level(level,
                "initialise it by MPI_Init_thread with that level, or leave it "
                "to init_process_group");
  } else {
    initialize();
  }
  World world;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &world.rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &world.size), "MPI_Comm_size");
  return world;
}

std::vector<std::string> exchange(const std::string& text) {
  using Text = std::array<char, kLongestText + 1>;
  if (text.size() > kLongestText) throw std::invalid_argument("long text");
  Text own{};
  std::copy(text.begin(), text.end(), own.begin());
  const Turn turn = await_turn();
  int size = 0;
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  std::vector<Text> all(size);
  check(MPI_Allgather(own.data(),
                      sizeof(Text),
                      MPI_CHAR,
                      all.data(),
                      sizeof(Text),
                      MPI_CHAR,
                      MPI_COMM_WORLD),
        "MPI_Allgather");
  std::vector<std::string> texts;
  for (const auto& each : all) texts.emplace_back(each.data());
  return texts;
}

void give_up() noexcept {
  given_up = true;
}

void expect_one_stopped() noexcept {
  one_may_be_stopped = true;
}

}  // namespace lockstep::comm::mpi
