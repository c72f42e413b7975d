#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "nn/shm_control.h"
#include "nn/transport.h"

namespace lockstep::nn {

/// Averages through shared memory, in the caller's thread.
///
/// Large gradients are born in the rank's own segment (memory/arena.h). Each
/// rank publishes where, and when all have, reduces its share of the gradient
/// of all ranks in place; the gradient is complete when all have done so. Peers
/// write to a gradient between these two points only.
///
/// Other gradients, and all where one rank's is not in its segment, pass in
/// pieces through two buffers per rank: every rank copies its piece in and
/// raises its `staged` count; when all have, each rank reduces all pieces into
/// its own gradients and raises its `consumed` count. A buffer is written again
/// when all have consumed it, so a small model takes one exchange of flags a
/// step. What is possible without waiting is done as gradients get ready; the
/// rest when backward ends.
///
/// A pass that ends in an exception abandons its round. Peers inside the round
/// learn it at once; the next round begins when all have come to it, and fails
/// where a peer could average the abandoned one.
class ShmTransport final : public Transport {
 public:
  /// Collective.
  ShmTransport(std::shared_ptr<distributed::Group> group,
               const std::vector<NamedTensor>& parameters,
               bool with_arena);
  ~ShmTransport() override;

  void begin() override;
  void ready(size_t index) override;
  void finish() override;
  [[noreturn]] void fail_unready(const std::vector<size_t>& missing) override;
  void abandon() noexcept override;
  void start_arena() noexcept override;
  void stop_arena() noexcept override;

 private:
  using Counter = std::atomic<uint64_t> RankState::*;

  /// Neighbouring parameters that travel together, or one large one.
  struct Unit {
    std::vector<size_t> parameters;
    std::vector<size_t> offsets;  ///< where each begins, in bytes
    size_t bytes = 0;
    size_t waiting_for = 0;
    std::optional<size_t> large;  ///< its number among the large ones
    bool in_place = false;        ///< of this round, once all have placed it
  };
  /// What to stage or to consume next.
  struct Cursor {
    size_t unit = 0;
    size_t offset = 0;
    uint64_t pieces = 0;
  };
  /// What the others have to reach before this rank can go on.
  struct Need {
    Counter counter;
    uint64_t target;
  };

  void make_units(bool with_arena);
  void make_arena(const std::string& name);
  void place(const Unit& unit);
  bool advance();
  bool stage();
  bool consume();
  void stage_piece();
  void consume_piece();
  void reduce_in_place(const Unit& unit);
  [[nodiscard]] bool lies_in_all_segments(const Unit& unit) const;

  [[nodiscard]] Need placed_by_all(const Unit& unit) const;
  [[nodiscard]] Need buffer_free() const;
  [[nodiscard]] Need piece_staged() const;
  [[nodiscard]] Need all_reduced() const;
  [[nodiscard]] Need next_need() const;
  [[nodiscard]] size_t buffer_of(const Cursor& cursor) const;
  void move_on(Cursor& cursor) const;
  template <class Visit>
  void for_each_part(const Cursor& cursor, const Visit& visit) const;

  [[nodiscard]] RankState& own() const;
  [[nodiscard]] bool reached(int rank, const Need& need) const;
  [[nodiscard]] bool all_reached(const Need& need) const;
  void publish(Counter counter, uint64_t value);
  [[nodiscard]] std::vector<int> late_ranks() const;
  [[nodiscard]] std::optional<int> rank_that_gave_up() const;
  [[noreturn]] void fail_given_up(int rank) const;
  void start_over();
  template <class Ready, class Missing>
  void wait(const Ready& ready, const Missing& missing);

  std::vector<NamedTensor> parameters_;
  std::vector<Unit> units_;
  std::vector<size_t> unit_of_;   ///< by parameter
  std::vector<char*> gradients_;  ///< of this round, by parameter
  size_t n_large_ = 0;
  std::unique_ptr<SharedControl> control_;
  std::vector<std::shared_ptr<comm::shm::Segment>> segments_;  ///< by rank
  std::unique_ptr<memory::Arena> arena_;  ///< over the own segment
  std::unique_ptr<comm::shm::Waiter> waiter_;

  std::vector<const void*> sources_;  ///< by rank, for one reduction
  std::vector<char*> blocks_;

  uint64_t round_ = 0;
  std::optional<int> culprit_;  ///< who gave up the last round, if a peer did
  bool open_ = false;           ///< between `begin` and the end of the round
  size_t launched_ = 0;         ///< the first so many units have all gradients
  Cursor stage_;
  Cursor consume_;
  uint64_t n_in_place_ = 0;             ///< large gradients reduced in place
  std::array<uint64_t, 2> last_use_{};  ///< of own buffers: progress at a piece
};

}  // namespace lockstep::nn
