#pragma once

#include <poll.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "run/line_sink.hpp"
#include "run/options.hpp"

namespace lockstep::run {

/// The descriptors a rank writes to; the mux keeps the other ends.
struct RankOutputs {
  base::UniqueFd stdout_fd;
  base::UniqueFd stderr_fd;
};

/// Forwards the ranks' outputs to the launcher's own (stdout to stdout, stderr to stderr) and to
/// their log files, line by line. Reads from a rank only after the launcher's reader has taken the
/// earlier output, so a rank that writes too fast blocks in its own write.
class OutputMux {
 public:
  explicit OutputMux(Prefix prefix);

  /// Opens the outputs of a rank. Throws SystemError. The logs may be empty descriptors.
  RankOutputs add(int rank, base::UniqueFd stdout_log, base::UniqueFd stderr_log);
  /// From now on a terminal shows a rank's output as it comes, not by lines, and now what has come
  /// of its last line: a prompt, and what is typed after it.
  void pass_at_once(int rank);
  /// A line of the launcher's own on stderr.
  void print_line(std::string_view line);

  /// What to poll for. Call service with the same entries after poll.
  void append_to(std::vector<pollfd>& entries);
  void service(std::span<const pollfd> entries);

  /// A process may still write to an output of this rank.
  bool is_open(int rank) const;
  /// From now on reads only what the rank's outputs hold already.
  void abandon(int rank);
  /// Everything is written except what a blocked reader does not take.
  bool stuck() const;
  bool idle() const;
  /// Why part of the outputs could not be written; 0: all was written. EPIPE: the reader closed.
  int write_error() const;

 private:
  struct Stream {
    int rank;
    int kind;  // 0 stdout, 1 stderr
    LineSink* sink;
    base::UniqueFd fd;
    base::UniqueFd log;
    std::string line;  // unfinished
    bool abandoned = false;
    bool passes_at_once = false;
  };

  base::UniqueFd open_stream(int rank, int kind, LineSink& sink, base::UniqueFd log);
  void read_from(Stream& stream);
  void take(Stream& stream, std::string_view text);
  void write_log(Stream& stream, std::string_view text);
  void close(Stream& stream);
  void report_loss();

  LineSink stdout_;
  std::optional<LineSink> own_stderr_;  // none if stdout and stderr are the same file
  LineSink* stderr_;
  std::vector<Stream> streams_;
  std::vector<std::size_t> polled_;  // the streams behind append_to's entries
  std::size_t n_sinks_polled_ = 0;
  bool is_loss_reported_ = false;
  std::size_t first_ = 0;  // served first, round robin
};

}  // namespace lockstep::run
