#pragma once

#include <chrono>
#include <cstdint>

/// Shows how far the training is: a bar that is redrawn in place on a terminal,
/// and one line per epoch everywhere.
class Progress {
 public:
  /// `images_per_epoch`: of all ranks together.
  Progress(int epochs, int64_t images_per_epoch);

  void begin_epoch();
  /// A step of all ranks over `images` images ended with `loss`.
  void step(int64_t images, double loss);
  /// Prints the epoch's line with its mean `loss`.
  void end_epoch(double loss);

 private:
  using Clock = std::chrono::steady_clock;

  void print(double loss, bool redraw) const;

  const int epochs_;
  const int64_t images_per_epoch_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_;
  Clock::time_point epoch_start_;
  int epoch_ = 0;
  int64_t images_ = 0;
};
