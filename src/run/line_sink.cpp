#include "run/line_sink.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <iterator>

namespace lockstep::run {
namespace {

constexpr int kNoSource = -1;
constexpr int kLauncher = -2;

// Cyan, green, yellow, magenta, blue, then their bright forms: red is for programs' errors.
constexpr std::array kColours = {36, 32, 33, 35, 34, 96, 92, 93, 95, 94};

}  // namespace

LineSink::LineSink(int fd, Style style) : fd_(fd), style_(style), is_terminal_(isatty(fd) == 1) {
  // Other processes may share this open file, so it must stay blocking. But a pipe or terminal that
  // poll reports writable takes PIPE_BUF bytes without blocking, and a regular file any number.
  struct stat status {};
  const bool is_file = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  n_bytes_at_once_ = is_file ? std::size_t{1} << 20 : PIPE_BUF;
}

void LineSink::append_prefix(int rank) {
  if (style_.colour) {
    const int colour = kColours[static_cast<std::size_t>(rank) % kColours.size()];
    fmt::format_to(std::back_inserter(pending_), "\x1b[{}m[{}]\x1b[0m ", colour, rank);
  } else {
    fmt::format_to(std::back_inserter(pending_), "[{}] ", rank);
  }
}

void LineSink::begin(int source) {
  if (open_line_ != kNoSource && open_line_ != source) {
    pending_ += '\n';
    open_line_ = kNoSource;
  }
}

void LineSink::put(int rank, int stream, std::string_view text) {
  if (text.empty() || broken()) return;
  const int source = 2 * rank + stream;
  begin(source);
  if (!style_.prefix) {
    pending_ += text;
    open_line_ = text.back() == '\n' ? kNoSource : source;
    return;
  }
  while (!text.empty()) {
    if (open_line_ == kNoSource) append_prefix(rank);
    // A carriage return restarts the line (progress bars), so the prefix is needed again.
    std::size_t n_bytes = std::min(text.find_first_of("\r\n"), text.size() - 1) + 1;
    if (text.substr(0, n_bytes).ends_with('\r') && text.substr(n_bytes).starts_with('\n')) {
      ++n_bytes;
    }
    const std::string_view line = text.substr(0, n_bytes);
    pending_ += line;
    text.remove_prefix(n_bytes);
    open_line_ = line.back() == '\n' ? kNoSource : source;
    if (line.back() == '\r') append_prefix(rank);
  }
}

void LineSink::print_line(std::string_view line) {
  begin(kLauncher);
  if (broken()) return;
  fmt::format_to(std::back_inserter(pending_), "lockstep: {}\n", line);
}

void LineSink::flush() {
  while (congested()) {
    pollfd ready{fd_, POLLOUT, 0};
    if (poll(&ready, 1, 0) <= 0) return;
    const std::size_t n_bytes = std::min(pending_.size() - n_written_, n_bytes_at_once_);
    const ssize_t n_sent = write(fd_, pending_.data() + n_written_, n_bytes);
    if (n_sent >= 0) {
      n_written_ += static_cast<std::size_t>(n_sent);
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      error_number_ = errno;
      n_written_ = pending_.size();
    }
  }
  pending_.clear();
  n_written_ = 0;
}

}  // namespace lockstep::run
