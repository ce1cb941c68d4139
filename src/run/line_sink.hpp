#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep::run {

/// One of the launcher's own outputs, shared by the ranks line by line: a started line is ended
/// before another source's begins. Never blocks on the reader.
class LineSink {
 public:
  struct Style {
    bool prefix;  ///< "[rank] " before each line
    bool colour;  ///< of the prefix
  };

  LineSink(int fd, Style style);

  /// Accepts text of `rank`: whole lines, or part of one. `stream` distinguishes the rank's stdout
  /// from its stderr.
  void put(int rank, int stream, std::string_view text);
  /// A line of the launcher's own.
  void print_line(std::string_view line);
  /// Writes what can be written now.
  void flush();

  /// Text is pending because the reader is slow.
  bool congested() const noexcept { return n_written_ < pending_.size(); }
  /// The reader is gone, or the disk is full: text is dropped from now on.
  bool broken() const noexcept { return error_number_ != 0; }
  /// The errno value; 0 if not broken.
  int error_number() const noexcept { return error_number_; }
  int fd() const noexcept { return fd_; }
  bool is_terminal() const noexcept { return is_terminal_; }

 private:
  void append_prefix(int rank);
  void begin(int source);

  int fd_;
  Style style_;
  bool is_terminal_;
  std::size_t n_bytes_at_once_;
  std::string pending_;
  std::size_t n_written_ = 0;
  int open_line_ = -1;  // the source of the unfinished line
  int error_number_ = 0;
};

}  // namespace lockstep::run
