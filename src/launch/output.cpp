#include "launch/output.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "core/block_sigpipe.h"

namespace lockstep::launcher {
namespace {

/// Workers wait when a sink holds more than this.
constexpr size_t kSinkBytes = 256 * 1024;
/// A longer line is cut, since it must be held until its end comes.
constexpr size_t kLineBytes = 1024 * 1024;
constexpr size_t kTailLines = 10;
constexpr size_t kTailLineBytes = 500;

/// A carriage return that is part of a line's end is dropped; of a line that
/// was overwritten several times, a terminal shows what came last.
std::string_view last_state(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  const auto start = line.rfind('\r');
  return start == std::string_view::npos ? line : line.substr(start + 1);
}

}  // namespace

Sink::Sink(int fd) : fd_(fd), terminal_(::isatty(fd) == 1) {
}

bool Sink::full() const {
  return pending_.size() > kSinkBytes;
}

void Sink::redraw_bar() {
  pending_ += "\r\x1b[K";
  pending_ += bar_;
}

void Sink::line(std::string_view prefix, std::string_view text) {
  const bool over_bar = !bar_.empty();
  if (over_bar) pending_ += "\r\x1b[K";
  pending_ += prefix;
  pending_ += text;
  pending_ += '\n';
  if (over_bar) redraw_bar();
}

void Sink::bar(std::string_view prefix, std::string_view text) {
  if (text.empty() && bar_.empty()) return;
  bar_ = text.empty() ? std::string() : std::string(prefix).append(text);
  redraw_bar();
}

void Sink::flush() {
  if (pending_.empty()) return;
  const BlockSigpipe block;
  while (error_ == 0 && !pending_.empty()) {
    pollfd ready = {fd_, POLLOUT, 0};
    if (::poll(&ready, 1, 0) == 0) return;
    // A pipe that is ready takes this much without blocking.
    const size_t size = std::min<size_t>(pending_.size(), PIPE_BUF);
    const ssize_t written = ::write(fd_, pending_.data(), size);
    if (written > 0) {
      pending_.erase(0, static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
  if (error_ != 0) pending_.clear();
}

LineSplitter::LineSplitter(Sink& sink, std::string prefix)
    : sink_(sink), prefix_(std::move(prefix)) {
}

void LineSplitter::take_line(std::string_view text) {
  if (sink_.is_terminal() && text.find('\r') != std::string_view::npos) {
    sink_.bar(prefix_, {});
    text = last_state(text);
  }
  sink_.line(prefix_, text);
  tail_.emplace_back(last_state(text).substr(0, kTailLineBytes));
  if (tail_.size() > kTailLines) tail_.pop_front();
}

void LineSplitter::add(std::string_view bytes) {
  size_t start = 0;
  for (;;) {
    const auto end = bytes.find('\n', start);
    if (end == std::string_view::npos) break;
    partial_ += bytes.substr(start, end - start);
    take_line(partial_);
    partial_.clear();
    start = end + 1;
  }
  partial_ += bytes.substr(start);
  if (partial_.size() > kLineBytes) {
    take_line(partial_);
    partial_.clear();
  }
  if (sink_.is_terminal() && partial_.find('\r') != std::string::npos) {
    const std::string shown(last_state(partial_));
    sink_.bar(prefix_, shown);
    // Only the last state can still matter. A return after it lets the next
    // text overwrite it.
    partial_ = '\r' + shown + (partial_.ends_with('\r') ? "\r" : "");
  }
}

void LineSplitter::finish() {
  if (!partial_.empty()) take_line(partial_);
  partial_.clear();
}

}  // namespace lockstep::launcher
