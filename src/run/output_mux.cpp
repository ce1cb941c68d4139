#include "run/output_mux.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "run/errors.hpp"
#include "run/terminal.hpp"
#include "world/variables.hpp"

namespace lockstep::run {
namespace {

// A longer line is forwarded in pieces; another rank's output may come between them.
constexpr std::size_t kLongestLine = std::size_t{1} << 20;

LineSink::Style style_of(int fd, Prefix prefix) {
  const bool terminal = isatty(fd) == 1;
  const bool plain =
      !internal::variable("NO_COLOR").value_or("").empty() || internal::variable("TERM") == "dumb";
  switch (prefix) {
    case Prefix::automatic: return {.prefix = terminal, .colour = terminal && !plain};
    case Prefix::always: return {.prefix = true, .colour = terminal && !plain};
    case Prefix::never: return {.prefix = false, .colour = false};
  }
  return {};
}

bool same_file(int a, int b) {
  struct stat of_a {};
  struct stat of_b {};
  return fstat(a, &of_a) == 0 && fstat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev &&
         of_a.st_ino == of_b.st_ino;
}

}  // namespace

OutputMux::OutputMux(Prefix prefix) : stdout_(STDOUT_FILENO, style_of(STDOUT_FILENO, prefix)) {
  if (!same_file(STDOUT_FILENO, STDERR_FILENO)) {
    own_stderr_.emplace(STDERR_FILENO, style_of(STDERR_FILENO, prefix));
  }
  stderr_ = own_stderr_ ? &*own_stderr_ : &stdout_;
}

RankOutputs OutputMux::add(int rank, base::UniqueFd stdout_log, base::UniqueFd stderr_log) {
  RankOutputs outputs;
  outputs.stdout_fd = open_stream(rank, /*kind=*/0, stdout_, std::move(stdout_log));
  outputs.stderr_fd = open_stream(rank, /*kind=*/1, *stderr_, std::move(stderr_log));
  return outputs;
}

base::UniqueFd OutputMux::open_stream(int rank, int kind, LineSink& sink, base::UniqueFd log) {
  OutputPair pair = sink.is_terminal() ? open_terminal(sink.fd()) : open_pipe();
  streams_.push_back({rank, kind, &sink, std::move(pair.launcher_end), std::move(log), {}});
  return std::move(pair.rank_end);
}

void OutputMux::pass_at_once(int rank) {
  for (Stream& stream : streams_) {
    if (stream.rank != rank || !stream.sink->is_terminal()) continue;
    stream.passes_at_once = true;
    stream.sink->put(stream.rank, stream.kind, stream.line);
    stream.sink->flush();
    stream.line.clear();
  }
}

void OutputMux::print_line(std::string_view line) {
  stderr_->print_line(line);
  stderr_->flush();
}

void OutputMux::append_to(std::vector<pollfd>& entries) {
  n_sinks_polled_ = 0;
  for (const LineSink* sink : {&stdout_, stderr_}) {
    if (!sink->congested()) continue;
    entries.push_back({sink->fd(), POLLOUT, 0});
    ++n_sinks_polled_;
  }
  polled_.clear();
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    const std::size_t index = (first_ + i) % streams_.size();
    const Stream& stream = streams_[index];
    if (stream.sink->congested()) continue;
    entries.push_back({stream.fd.get(), POLLIN, 0});
    polled_.push_back(index);
  }
}

void OutputMux::service(std::span<const pollfd> entries) {
  stdout_.flush();
  stderr_->flush();
  for (std::size_t i = 0; i < polled_.size(); ++i) {
    Stream& stream = streams_[polled_[i]];
    if (stream.sink->congested()) continue;
    if (entries[n_sinks_polled_ + i].revents != 0) {
      first_ = polled_[i] + 1;
      read_from(stream);
    } else if (stream.abandoned) {
      close(stream);
    }
  }
  std::erase_if(streams_, [](const Stream& stream) { return !stream.fd; });
  if (first_ >= streams_.size()) first_ = 0;
  report_loss();
}

void OutputMux::report_loss() {
  // A reader that closed its end, as head does, needs no report.
  if (!stdout_.broken() || stdout_.error_number() == EPIPE || is_loss_reported_) return;
  is_loss_reported_ = true;
  print_line(fmt::format("the ranks' output is lost from here on: cannot write stdout: {}",
                         std::strerror(stdout_.error_number())));
}

void OutputMux::read_from(Stream& stream) {
  std::array<char, 65536> buffer;
  const ssize_t n_bytes = read(stream.fd.get(), buffer.data(), buffer.size());
  if (n_bytes > 0) {
    take(stream, {buffer.data(), static_cast<std::size_t>(n_bytes)});
  } else if (n_bytes == 0 || (errno != EAGAIN && errno != EINTR)) {
    close(stream);  // a terminal ends with EIO
  }
}

void OutputMux::take(Stream& stream, std::string_view text) {
  write_log(stream, text);
  // On a terminal a carriage return shows what came before it, for progress bars.
  const std::size_t last =
      stream.sink->is_terminal() ? text.find_last_of("\r\n") : text.rfind('\n');
  const std::size_t n_bytes = stream.passes_at_once ? text.size() : last + 1;  // npos + 1 is 0
  if (n_bytes > 0) {
    stream.line += text.substr(0, n_bytes);
    stream.sink->put(stream.rank, stream.kind, stream.line);
    stream.line.clear();
  }
  stream.line += text.substr(n_bytes);
  if (stream.line.size() > kLongestLine) {
    stream.sink->put(stream.rank, stream.kind, stream.line);
    stream.line.clear();
  }
  stream.sink->flush();
  // If the reader is gone, the rank must notice as in any pipeline: by SIGPIPE.
  if (stream.sink->broken() && !stream.log) close(stream);
}

void OutputMux::write_log(Stream& stream, std::string_view text) {
  while (stream.log && !text.empty()) {
    const ssize_t n_bytes = write(stream.log.get(), text.data(), text.size());
    if (n_bytes >= 0) {
      text.remove_prefix(static_cast<std::size_t>(n_bytes));
    } else if (errno != EINTR) {
      print_line(fmt::format("the log of rank {}'s {} ends here: cannot write it: {}", stream.rank,
                             stream.kind == 0 ? "stdout" : "stderr", std::strerror(errno)));
      stream.log.reset();
    }
  }
}

void OutputMux::close(Stream& stream) {
  stream.sink->put(stream.rank, stream.kind, stream.line);
  stream.sink->flush();
  stream.line.clear();
  stream.fd.reset();
}

bool OutputMux::is_open(int rank) const {
  return std::any_of(streams_.begin(), streams_.end(),
                     [rank](const Stream& stream) { return stream.rank == rank; });
}

void OutputMux::abandon(int rank) {
  for (Stream& stream : streams_) stream.abandoned = stream.abandoned || stream.rank == rank;
}

bool OutputMux::stuck() const { return stdout_.congested() || stderr_->congested(); }

bool OutputMux::idle() const { return streams_.empty() && !stuck(); }

int OutputMux::write_error() const {
  return stdout_.broken() ? stdout_.error_number() : stderr_->error_number();
}

}  // namespace lockstep::run
