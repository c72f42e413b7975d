#include "comm/backends/mpi/module/messages.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "comm/backends/mpi/module/environment.h"

namespace lockstep::comm::mpi {
namespace {

using namespace std::chrono_literals;

// How often the members are asked for, and how long what a member sent before
// it ended may still be under way.
constexpr auto kLookEvery = 100ms;
constexpr auto kGrace = 1s;

// How long MPI may take to cancel.
constexpr auto kCancelTime = 200ms;

MPI_Comm communicator(const std::vector<int>& world_ranks, int tag) {
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group members = MPI_GROUP_NULL;
  MPI_Comm result = MPI_COMM_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world,
                       static_cast<int>(world_ranks.size()),
                       world_ranks.data(),
                       &members),
        "MPI_Group_incl");
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &result),
        "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  check(MPI_Comm_set_errhandler(result, MPI_ERRORS_RETURN),
        "MPI_Comm_set_errhandler");
  return result;
}

/// Whether nothing has come that was not received.
bool is_empty(MPI_Comm through) {
  int found = 0;
  check(MPI_Iprobe(
            MPI_ANY_SOURCE, MPI_ANY_TAG, through, &found, MPI_STATUS_IGNORE),
        "MPI_Iprobe");
  return found == 0;
}

std::exception_ptr error(const std::string& text) {
  return std::make_exception_ptr(std::runtime_error(text));
}

std::string text_of(int code) {
  try {
    check(code, "MPI_Testsome");
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

Messages::Messages(Members members)
    : members_(std::move(members)), ended_since_(members_.world_ranks.size()) {
  const Turn turn = await_turn();
  first_ = communicator(members_.world_ranks, 0);
  rest_ = communicator(members_.world_ranks, 1);
}

void Messages::post(const Pointer& message) {
  const Turn turn = await_turn();
  if (closed_) throw std::runtime_error("the group is closed");
  post_part(message, 0);
  if (message->bytes_posted_ == message->bytes()) return;
  if (message->is_send()) {
    post_rest(message);
  } else {
    unfinished_.push_back(message);
  }
}

void Messages::post_part(const Pointer& message, size_t start) {
  const size_t bytes =
      std::min(members_.longest_part, message->bytes() - start);
  char* const data = static_cast<char*>(message->tensor_.data_ptr()) + start;
  const auto count = static_cast<int>(bytes);
  const MPI_Comm through = start == 0 ? first_ : rest_;
  MPI_Request request = MPI_REQUEST_NULL;
  if (message->is_send()) {
    check(MPI_Isend(data,
                    count,
                    MPI_BYTE,
                    message->peer_,
                    message->tag_,
                    through,
                    &request),
          "MPI_Isend");
  } else {
    check(MPI_Irecv(data,
                    count,
                    MPI_BYTE,
                    message->peer_,
                    message->tag_,
                    through,
                    &request),
          "MPI_Irecv");
  }
  requests_.push_back(request);
  parts_.push_back({message, bytes});
  message->bytes_posted_ += bytes;
  ++message->parts_under_way_;
}

void Messages::post_rest(const Pointer& message) {
  while (message->bytes_posted_ < message->bytes()) {
    post_part(message, message->bytes_posted_);
  }
}

/// The parts after the first are told apart by their order alone, so receives
/// with one tag must ask for them in the order in which their first parts were
/// matched, which is that of posting.
void Messages::post_rests_in_order() {
  std::vector<int> held_back;  // tags
  std::erase_if(unfinished_, [&](const Pointer& message) {
    if (message->has_ended()) return true;  // with an error
    const bool first_came = message->parts_under_way_ == 0;
    if (!first_came ||
        std::find(held_back.begin(), held_back.end(), message->tag_) !=
            held_back.end()) {
      held_back.push_back(message->tag_);
      return false;
    }
    try {
      post_rest(message);
    } catch (...) {
      message->end(std::current_exception());
    }
    return true;
  });
}

void Messages::progress() {
  const Turn turn;
  if (!turn || requests_.empty()) return;
  take_arrived();
  if (!unfinished_.empty()) post_rests_in_order();
  if (Clock::now() >= next_look_) fail_orphans();
}

void Messages::take_arrived() {
  const size_t n = requests_.size();
  arrived_.resize(n);
  statuses_.resize(n);
  int count = 0;
  const int code = MPI_Testsome(static_cast<int>(n),
                                requests_.data(),
                                &count,
                                arrived_.data(),
                                statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    for (const auto& part : parts_) part.message->end(error(text_of(code)));
    return;
  }
  if (count == 0 || count == MPI_UNDEFINED) return;
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [this](int a, int b) {
    return arrived_[a] < arrived_[b];
  });
  for (const int i : order) {
    take(parts_[arrived_[i]], statuses_[i], code == MPI_ERR_IN_STATUS);
  }
  for (size_t i = order.size(); i-- > 0;) {
    const int at = arrived_[order[i]];
    requests_.erase(requests_.begin() + at);
    parts_.erase(parts_.begin() + at);
  }
}

std::string Messages::name(int rank) const {
  return "rank " + std::to_string(members_.peers->global_rank(rank));
}

void Messages::take(const Part& part, MPI_Status& status, bool has_error) {
  Message& message = *part.message;
  --message.parts_under_way_;
  int cancelled = 0;
  MPI_Test_cancelled(&status, &cancelled);
  if (cancelled != 0) {
    return message.end(error("the group was closed"));
  }
  if (has_error && status.MPI_ERROR != MPI_SUCCESS) {
    return message.end(error(text_of(status.MPI_ERROR)));
  }
  if (!message.is_send()) {
    message.peer_ = status.MPI_SOURCE;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (static_cast<size_t>(bytes) != part.bytes) {
      return message.end(error(name(message.peer_) + " sent " +
                               std::to_string(bytes) + " bytes where " +
                               std::to_string(part.bytes) + " were expected"));
    }
  }
  if (message.parts_under_way_ == 0 &&
      message.bytes_posted_ == message.bytes()) {
    message.end(nullptr);
  }
}

/// MPI does not tell that a peer has ended.
void Messages::fail_orphans() {
  const auto now = Clock::now();
  next_look_ = now + kLookEvery;
  for (size_t rank = 0; rank < ended_since_.size(); ++rank) {
    if (!ended_since_[rank] && members_.peers->ended(static_cast<int>(rank))) {
      ended_since_[rank] = now;
    }
  }
  for (const auto& part : parts_) {
    Message& message = *part.message;
    if (is_orphan(message)) {
      message.end(error(message.peer_ == MPI_ANY_SOURCE
                            ? "all other ranks have ended"
                            : name(message.peer_) + " has ended"));
    }
  }
}

bool Messages::is_orphan(const Message& message) const {
  const auto is_gone = [this](size_t rank) {
    return ended_since_[rank] && Clock::now() - *ended_since_[rank] > kGrace;
  };
  if (message.peer_ != MPI_ANY_SOURCE) return is_gone(message.peer_);
  for (size_t rank = 0; rank < ended_since_.size(); ++rank) {
    if (static_cast<int>(rank) != members_.rank && !is_gone(rank)) return false;
  }
  return true;
}

void Messages::cancel_receives() {
  const Turn turn = await_turn();
  closed_ = true;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (!parts_[i].message->is_send()) MPI_Cancel(&requests_[i]);
  }
}

bool Messages::receives() const {
  const Turn turn = await_turn();
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) {
    return !part.message->is_send();
  });
}

void Messages::close(bool members_are_done) noexcept {
  if (members_.peers->timed_out()) expect_one_stopped();
  try {
    cancel_receives();
    for (const Deadline deadline(kCancelTime); receives();) {
      if (deadline.passed()) break;
      progress();
      std::this_thread::sleep_for(1ms);
    }
    const bool writes = receives();
    const Turn turn = await_turn();
    if (parts_.empty() && members_are_done && is_empty(first_) &&
        is_empty(rest_)) {
      MPI_Comm_free(&first_);
      MPI_Comm_free(&rest_);
    }
    new std::vector<Part>(std::move(parts_));  // MPI still uses them
    new std::vector<MPI_Request>(std::move(requests_));
    if (!writes && !members_.peers->failed()) return;
  } catch (const std::exception&) {
    // MPI cannot be used.
  }
  give_up();
}

}  // namespace lockstep::comm::mpi
