#include "train/progress.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace train {
namespace {

constexpr std::size_t kLeastBar = 6;
constexpr std::size_t kMostBar = 40;
constexpr std::size_t kUsualWidth = 80;
constexpr std::chrono::milliseconds kDrawEvery{100};

std::string bar_of(std::size_t width, std::size_t done, std::size_t all) {
  const std::size_t inner = width - 2;
  const std::size_t filled = all == 0 ? inner : inner * std::min(done, all) / all;
  return fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", inner - filled);
}

std::size_t width_of(std::FILE* terminal) {
  winsize size{};
  if (ioctl(fileno(terminal), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsualWidth;
  return size.ws_col;
}

}  // namespace

std::string format_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-:--";
  const auto whole = static_cast<long long>(std::min(std::ceil(seconds), 359'999'999.0));
  const auto hours = whole / 3600;
  const auto minutes = whole / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60);
  return fmt::format("{}:{:02}", minutes, whole % 60);
}

std::string render_progress(const ProgressState& state, std::size_t width) {
  const std::array<std::string, 4> figures = {
      fmt::format("epoch {}/{}", state.epoch, state.n_epochs),
      fmt::format("loss {:.4f}", state.loss),
      fmt::format("{} left", format_seconds(state.seconds_left)),
      fmt::format("{:.0f} images/s", state.images_per_second),
  };
  std::string right;
  std::size_t shown = 1;
  while (shown < figures.size()) {
    const std::string more = fmt::format("{}  {}", right, figures[shown]);
    if (figures[0].size() + more.size() > width) break;
    right = more;
    ++shown;
  }
  std::string line = figures[0];
  const std::size_t used = line.size() + right.size();
  if (shown == figures.size() && used + 1 + kLeastBar <= width) {
    line +=
        fmt::format(" {}", bar_of(std::min(width - used - 1, kMostBar), state.step, state.n_steps));
  }
  return (line + right).substr(0, width);
}

ProgressBar::ProgressBar(std::FILE* out) : out_(out), on_terminal_(isatty(fileno(out)) == 1) {}

void ProgressBar::update(const ProgressState& state) {
  if (!on_terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_draw_) return;
  next_draw_ = now + kDrawEvery;
  // Leave the last column free: some terminals wrap if it is written.
  fmt::print(out_, "\r{}\x1b[K", render_progress(state, width_of(out_) - 1));
  std::fflush(out_);
  drawn_ = true;
}

void ProgressBar::clear() {
  if (!drawn_) return;
  fmt::print(out_, "\r\x1b[K");
  std::fflush(out_);
  drawn_ = false;
}

}  // namespace train
