#include "nn/shm_transport.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "comm/kernels/reduce.h"
#include "comm/kernels/two_ranks.h"
#include "comm/liveness.h"
#include "distributed/group.h"
#include "lockstep/distributed/collectives.h"
#include "nn/messages.h"

namespace lockstep::nn {
namespace {

constexpr size_t kAlignment = 64;
static_assert(kAlignment % comm::kernels::kTwoRanksLine == 0);
static_assert(memory::Arena::kAlignment % kAlignment == 0);

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Memory is reduced as it lies, so all ranks need the same layout.
bool same_layout(const at::Tensor& gradient, const at::Tensor& parameter) {
  return parameter.is_contiguous()
             ? gradient.is_contiguous()
             : gradient.strides() == parameter.strides() &&
                   gradient.is_non_overlapping_and_dense();
}

/// A name that all ranks agree on, which no other wrapper of the group has.
std::string agree_on_name(const std::shared_ptr<distributed::Group>& group) {
  static std::atomic<int64_t> wrappers{0};
  auto number = at::scalar_tensor(wrappers.fetch_add(1), at::kLong);
  broadcast(number, {.group = ProcessGroup(group), .group_src = 0});
  return "ddp/" + group->name + '/' + std::to_string(number.item<int64_t>());
}

}  // namespace

ShmTransport::ShmTransport(std::shared_ptr<distributed::Group> group,
                           const std::vector<NamedTensor>& parameters,
                           bool with_arena)
    : Transport(std::move(group)),
      parameters_(parameters),
      unit_of_(parameters.size()),
      gradients_(parameters.size()),
      sources_(static_cast<size_t>(group_->world_size)),
      blocks_(static_cast<size_t>(group_->world_size)) {
  make_units(with_arena);
  const std::string name = agree_on_name(group_);
  control_ = std::make_unique<SharedControl>(
      comm::shm::share_one(*group_->liveness,
                           name,
                           SharedControl::bytes(group_->world_size, n_large_),
                           group_->timeout),
      group_->world_size,
      n_large_);
  if (n_large_ > 0) make_arena(name + "/gradients");
  waiter_ = std::make_unique<comm::shm::Waiter>(own().bell, group_->liveness);
}

void ShmTransport::make_units(bool with_arena) {
  for (size_t i = parameters_.size(); i-- > 0;) {
    const size_t bytes = aligned(parameters_[i].tensor.nbytes());
    const bool large = bytes >= SharedControl::kPieceBytes;
    if (units_.empty() || large || units_.back().large ||
        units_.back().bytes + bytes > SharedControl::kPieceBytes) {
      units_.emplace_back();
      if (large && with_arena) units_.back().large = n_large_++;
    }
    auto& unit = units_.back();
    unit.parameters.push_back(i);
    unit.offsets.push_back(unit.bytes);
    unit.bytes += bytes;
    unit_of_[i] = units_.size() - 1;
  }
}

void ShmTransport::make_arena(const std::string& name) {
  std::vector<size_t> slots;
  for (const auto& unit : units_) {
    if (unit.large) {
      slots.push_back(parameters_[unit.parameters[0]].tensor.nbytes());
    }
  }
  segments_ = comm::shm::share_each(
      *group_->liveness, name, memory::Arena::bytes(slots), group_->timeout);
  const auto& mine = segments_[static_cast<size_t>(group_->rank)];
  arena_ = std::make_unique<memory::Arena>(mine, mine->data(), slots);
}

ShmTransport::~ShmTransport() = default;

RankState& ShmTransport::own() const {
  return control_->state(group_->rank);
}

void ShmTransport::begin() {
  check_usable();
  ++round_;
  open_ = true;
  launched_ = 0;
  n_in_place_ = 0;
  stage_ = consume_ = {};
  for (auto& unit : units_) unit.waiting_for = unit.parameters.size();
  publish(&RankState::begun, round_);
  if (own().completed.load(std::memory_order_relaxed) + 1 != round_) {
    start_over();
  }
}

/// After an abandoned round: once all have begun this one, nobody reads what
/// belonged to it.
void ShmTransport::start_over() {
  const auto late = [this] {
    std::vector<int> ranks;
    for (int rank = 0; rank < group_->world_size; ++rank) {
      if (control_->state(rank).begun.load(std::memory_order_acquire) <
          round_) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  };
  wait([&] { return late().empty(); }, late);
  own().n_unready.store(0, std::memory_order_relaxed);
  last_use_ = {};
  auto context = group_->context("backward");
  context.peers = {group_->ranks[static_cast<size_t>(
      std::exchange(culprit_, std::nullopt).value_or(group_->rank))]};
  for (int rank = 0; rank < group_->world_size; ++rank) {
    if (control_->state(rank).completed.load(std::memory_order_acquire) + 1 !=
        round_) {
      continue;
    }
    throw MismatchError(gave_up_late_message(context.peers.front()), context);
  }
}

void ShmTransport::ready(size_t index) {
  const auto& parameter = parameters_[index].tensor;
  auto& gradient = parameter.mutable_grad();
  if (!same_layout(gradient, parameter)) {
    const at::NoGradGuard no_grad;
    gradient = at::empty_like(parameter, parameter.options()).copy_(gradient);
  }
  gradients_[index] = static_cast<char*>(gradient.mutable_data_ptr());
  --units_[unit_of_[index]].waiting_for;
  while (launched_ < units_.size() && units_[launched_].waiting_for == 0) {
    if (units_[launched_].large) place(units_[launched_]);
    ++launched_;
  }
  advance();
}

void ShmTransport::finish() {
  std::optional<int> gave_up;
  wait(
      [&] {
        if (advance()) return true;
        gave_up = rank_that_gave_up();
        return gave_up.has_value();
      },
      [this] { return late_ranks(); });
  if (gave_up) {
    culprit_ = gave_up;
    fail_given_up(*gave_up);
  }
  own().completed.store(round_, std::memory_order_release);
  open_ = false;
}

/// Publishes where a large gradient lies.
void ShmTransport::place(const Unit& unit) {
  const size_t index = unit.parameters[0];
  const auto offset =
      arena_->offset_of(gradients_[index], parameters_[index].tensor.nbytes());
  control_->place(group_->rank, *unit.large) =
      offset.value_or(SharedControl::kNowhere);
  publish(&RankState::placed, progress(round_, *unit.large + 1));
}

/// Does all that needs no waiting; whether the round is done.
bool ShmTransport::advance() {
  while (stage() || consume()) {
  }
  return consume_.unit == units_.size() && all_reached(all_reduced());
}

bool ShmTransport::stage() {
  if (stage_.unit == launched_) return false;
  auto& unit = units_[stage_.unit];
  if (unit.large && stage_.offset == 0) {
    if (!all_reached(placed_by_all(unit))) return false;
    unit.in_place = lies_in_all_segments(unit);
    if (unit.in_place) {
      ++stage_.unit;
      return true;
    }
  }
  if (!all_reached(buffer_free())) return false;
  stage_piece();
  return true;
}

bool ShmTransport::consume() {
  if (consume_.unit == stage_.unit && consume_.offset == stage_.offset) {
    return false;
  }
  const auto& unit = units_[consume_.unit];
  if (unit.in_place) {
    reduce_in_place(unit);
    ++consume_.unit;
    return true;
  }
  if (!all_reached(piece_staged())) return false;
  consume_piece();
  return true;
}

void ShmTransport::stage_piece() {
  const size_t number = buffer_of(stage_);
  char* buffer = control_->buffer(group_->rank, number);
  for_each_part(stage_, [&](size_t index, size_t from, size_t to, size_t n) {
    std::memcpy(buffer + to, gradients_[index] + from, n);
  });
  move_on(stage_);
  last_use_[number] = progress(round_, stage_.pieces);
  publish(&RankState::staged, last_use_[number]);
}

void ShmTransport::consume_piece() {
  for_each_part(consume_, [&](size_t index, size_t from, size_t to, size_t n) {
    for (int rank = 0; rank < group_->world_size; ++rank) {
      sources_[static_cast<size_t>(rank)] =
          control_->buffer(rank, buffer_of(consume_)) + to;
    }
    const auto& parameter = parameters_[index].tensor;
    comm::kernels::reduce(ReduceOp::AVG,
                          parameter.scalar_type(),
                          gradients_[index] + from,
                          sources_.data(),
                          group_->world_size,
                          n / parameter.element_size());
  });
  move_on(consume_);
  publish(&RankState::consumed, progress(round_, consume_.pieces));
}

/// Reduces this rank's share of the gradient and hands it to all.
void ShmTransport::reduce_in_place(const Unit& unit) {
  const auto& parameter = parameters_[unit.parameters[0]].tensor;
  const auto ranks = static_cast<size_t>(group_->world_size);
  const auto own_rank = static_cast<size_t>(group_->rank);
  const size_t item = parameter.element_size();
  const size_t share = aligned((parameter.nbytes() + ranks - 1) / ranks);
  const size_t end = std::min(parameter.nbytes(), share * (own_rank + 1));
  const auto average_both =
      ranks == 2 ? comm::kernels::average_both_kernel(parameter.scalar_type())
                 : nullptr;
  // Small enough to be in the cache still when it is copied.
  constexpr size_t kBlock = 64 * 1024;
  for (size_t from = share * own_rank; from < end; from += kBlock) {
    const size_t n = std::min(kBlock, end - from);
    for (size_t rank = 0; rank < ranks; ++rank) {
      blocks_[rank] = segments_[rank]->data() +
                      control_->place(static_cast<int>(rank), *unit.large) +
                      from;
      sources_[rank] = blocks_[rank];
    }
    if (average_both != nullptr) {
      // The last line's rest is the slot's own.
      average_both(blocks_[0], blocks_[1], aligned(n));
      continue;
    }
    char* result = blocks_[own_rank];
    comm::kernels::reduce(ReduceOp::AVG,
                          parameter.scalar_type(),
                          result,
                          sources_.data(),
                          group_->world_size,
                          n / item);
    for (char* block : blocks_) {
      if (block != result) std::memcpy(block, result, n);
    }
  }
  ++n_in_place_;
  publish(&RankState::reduced, progress(round_, n_in_place_));
}

bool ShmTransport::lies_in_all_segments(const Unit& unit) const {
  for (int rank = 0; rank < group_->world_size; ++rank) {
    if (control_->place(rank, *unit.large) == SharedControl::kNowhere) {
      return false;
    }
  }
  return true;
}

ShmTransport::Need ShmTransport::placed_by_all(const Unit& unit) const {
  return {&RankState::placed, progress(round_, *unit.large + 1)};
}

ShmTransport::Need ShmTransport::buffer_free() const {
  return {&RankState::consumed, last_use_[buffer_of(stage_)]};
}

ShmTransport::Need ShmTransport::piece_staged() const {
  return {&RankState::staged, progress(round_, consume_.pieces + 1)};
}

ShmTransport::Need ShmTransport::all_reduced() const {
  return {&RankState::reduced,
          n_in_place_ == 0 ? 0 : progress(round_, n_in_place_)};
}

/// What an `advance` that did not end the round waits for.
ShmTransport::Need ShmTransport::next_need() const {
  if (consume_.unit == units_.size()) return all_reduced();
  if (consume_.pieces != stage_.pieces) return piece_staged();
  const auto& unit = units_[stage_.unit];
  if (unit.large && stage_.offset == 0 && !all_reached(placed_by_all(unit))) {
    return placed_by_all(unit);
  }
  return buffer_free();
}

/// The buffers alternate within a round and between rounds of one piece.
size_t ShmTransport::buffer_of(const Cursor& cursor) const {
  return (round_ + cursor.pieces) % 2;
}

void ShmTransport::move_on(Cursor& cursor) const {
  ++cursor.pieces;
  cursor.offset += SharedControl::kPieceBytes;
  if (cursor.offset >= units_[cursor.unit].bytes) {
    ++cursor.unit;
    cursor.offset = 0;
  }
}

/// Calls `visit(parameter, offset in it, offset in the piece, bytes)`.
template <class Visit>
void ShmTransport::for_each_part(const Cursor& cursor,
                                 const Visit& visit) const {
  const auto& unit = units_[cursor.unit];
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    const size_t index = unit.parameters[i];
    const size_t begin = std::max(unit.offsets[i], cursor.offset);
    const size_t end =
        std::min(unit.offsets[i] + parameters_[index].tensor.nbytes(),
                 cursor.offset + SharedControl::kPieceBytes);
    if (begin >= end) continue;
    visit(index, begin - unit.offsets[i], begin - cursor.offset, end - begin);
  }
}

/// Whether the rank's counter has come to the target, which belongs to this
/// round or an earlier one. A rank that is rounds ahead has, if it finished
/// that one.
bool ShmTransport::reached(int rank, const Need& need) const {
  const auto& state = control_->state(rank);
  const uint64_t value = (state.*need.counter).load(std::memory_order_acquire);
  const uint64_t round = need.target >> kCountBits;
  if (value >> kCountBits <= round) return value >= need.target;
  return state.completed.load(std::memory_order_acquire) >= round;
}

bool ShmTransport::all_reached(const Need& need) const {
  for (int rank = 0; rank < group_->world_size; ++rank) {
    if (!reached(rank, need)) return false;
  }
  return true;
}

void ShmTransport::publish(Counter counter, uint64_t value) {
  (own().*counter).store(value, std::memory_order_release);
  for (int rank = 0; rank < group_->world_size; ++rank) {
    if (rank != group_->rank) comm::shm::ring(control_->state(rank).bell);
  }
}

std::vector<int> ShmTransport::late_ranks() const {
  const Need need = next_need();
  std::vector<int> ranks;
  for (int rank = 0; rank < group_->world_size; ++rank) {
    if (!reached(rank, need)) ranks.push_back(rank);
  }
  return ranks;
}

std::optional<int> ShmTransport::rank_that_gave_up() const {
  for (int rank = 0; rank < group_->world_size; ++rank) {
    const auto& state = control_->state(rank);
    if (state.abandoned.load(std::memory_order_acquire) == round_) return rank;
  }
  return std::nullopt;
}

void ShmTransport::fail_given_up(int rank) const {
  auto context = group_->context("backward");
  const int culprit = group_->ranks[static_cast<size_t>(rank)];
  context.peers = {culprit};
  const auto& state = control_->state(rank);
  const auto completed = [](const RankState& of) {
    return of.completed.load(std::memory_order_acquire);
  };
  if (completed(own()) + 1 == round_ && completed(state) < completed(own())) {
    throw MismatchError(gave_up_late_message(culprit), context);
  }
  std::vector<size_t> missing(std::min<size_t>(
      state.n_unready.load(std::memory_order_acquire), RankState::kMaxUnready));
  for (size_t i = 0; i < missing.size(); ++i) {
    missing[i] = std::min<size_t>(state.unready[i], parameters_.size() - 1);
  }
  throw MismatchError(gave_up_message(culprit, parameters_, missing), context);
}

void ShmTransport::fail_unready(const std::vector<size_t>& missing) {
  auto& state = own();
  const size_t n = std::min(missing.size(), RankState::kMaxUnready);
  for (size_t i = 0; i < n; ++i) {
    state.unready[i] = static_cast<uint32_t>(missing[i]);
  }
  state.n_unready.store(static_cast<uint32_t>(n), std::memory_order_release);
  throw InvalidArgument(unready_message(parameters_, missing),
                        group_->context("backward"));
}

void ShmTransport::abandon() noexcept {
  if (!std::exchange(open_, false)) return;
  // A peer may still be writing to them.
  for (size_t i = 0; i < launched_; ++i) {
    if (units_[i].large) {
      parameters_[units_[i].parameters[0]].tensor.mutable_grad().reset();
    }
  }
  // Where the group failed, liveness names the culprit to all. Where another
  // rank gave the round up, its own mark does.
  if (!failed_ && !culprit_) publish(&RankState::abandoned, round_);
}

void ShmTransport::start_arena() noexcept {
  if (arena_) arena_->activate();
}

void ShmTransport::stop_arena() noexcept {
  if (arena_) arena_->deactivate();
}

template <class Ready, class Missing>
void ShmTransport::wait(const Ready& ready, const Missing& missing) {
  auto& liveness = *group_->liveness;
  const auto context = [this] { return group_->context("backward"); };
  std::optional<TimeoutError> timed_out;
  const auto ready_or_over = [&] {
    if (ready()) return true;
    if (liveness.disturbed()) timed_out = liveness.timed_out(context());
    return timed_out.has_value();
  };
  try {
    waiter_->wait(ready_or_over, group_->timeout, missing, context);
    if (timed_out) throw *timed_out;
  } catch (...) {
    if (arena_) arena_->retire();
    fail_for_good();
    throw;
  }
}

}  // namespace lockstep::nn
