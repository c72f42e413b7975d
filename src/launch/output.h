#pragma once

#include <deque>
#include <string>
#include <string_view>

namespace lockstep::launcher {

/// One output of the launcher, which all workers share. Never blocks: what the
/// reader does not take yet waits here, and workers wait when that is much.
class Sink {
 public:
  /// `fd` is borrowed.
  explicit Sink(int fd);

  /// Adds one whole line. `text` ends without a newline.
  void line(std::string_view prefix, std::string_view text);
  /// Shows an unfinished line at the bottom of a terminal, in place of the one
  /// before.
  void bar(std::string_view prefix, std::string_view text);

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] bool is_terminal() const { return terminal_; }
  [[nodiscard]] bool pending() const { return !pending_.empty(); }
  [[nodiscard]] bool full() const;
  /// The errno of the write that failed, 0 before: all output since is lost.
  [[nodiscard]] int error() const { return error_; }
  /// Writes what the reader takes now.
  void flush();

 private:
  void redraw_bar();

  int fd_;
  bool terminal_;
  int error_ = 0;
  std::string pending_;
  std::string bar_;
};

/// Cuts the bytes of one worker's output into lines for a sink.
class LineSplitter {
 public:
  LineSplitter(Sink& sink, std::string prefix);

  void add(std::string_view bytes);
  /// Passes an unfinished last line on.
  void finish();
  /// The last lines, oldest first.
  [[nodiscard]] const std::deque<std::string>& tail() const { return tail_; }

 private:
  void take_line(std::string_view text);

  Sink& sink_;
  std::string prefix_;
  std::string partial_;
  std::deque<std::string> tail_;
};

}  // namespace lockstep::launcher
