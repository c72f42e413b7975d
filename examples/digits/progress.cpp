#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

// `lockstep run` reads its workers' output through pipes; it tells them when
// it shows that output on a terminal.
Progress::Progress(int epochs, int64_t images_per_epoch)
    : epochs_(epochs),
      images_per_epoch_(images_per_epoch),
      terminal_(isatty(STDOUT_FILENO) != 0 ||
                std::getenv("LOCKSTEP_PROGRESS") != nullptr) {
}

void Progress::begin_epoch() {
  ++epoch_;
  images_ = 0;
  epoch_start_ = Clock::now();
}

void Progress::step(int64_t images, double loss) {
  images_ += images;
  if (terminal_ && Clock::now() - drawn_ > std::chrono::milliseconds(50)) {
    print(loss, true);
    drawn_ = Clock::now();
  }
}

void Progress::end_epoch(double loss) {
  print(loss, false);
}

void Progress::print(double loss, bool redraw) const {
  constexpr int kWidth = 16;
  const auto now = Clock::now();
  const double part =
      std::min(1.0, static_cast<double>(images_) / images_per_epoch_);
  const double done = (epoch_ - 1 + part) / epochs_;
  const double left = seconds(now - start_) * (1 / done - 1);
  const int filled = static_cast<int>(std::lround(kWidth * part));
  const auto bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  std::printf("%sepoch %2d/%d [%s] loss %.4f  %6.0f images/s  ETA %d:%02d%s",
              terminal_ ? "\r" : "",
              epoch_,
              epochs_,
              bar.c_str(),
              loss,
              static_cast<double>(images_) / seconds(now - epoch_start_),
              static_cast<int>(left) / 60,
              static_cast<int>(left) % 60,
              redraw ? "" : "\n");
  std::fflush(stdout);
}
