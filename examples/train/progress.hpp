#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>

namespace train {

/// What a progress line shows.
struct ProgressState {
  std::size_t epoch = 0;  ///< from 1
  std::size_t n_epochs = 0;
  std::size_t step = 0;  ///< done in this epoch
  std::size_t n_steps = 0;
  double loss = 0;
  double images_per_second = 0;
  double seconds_left = 0;  ///< of the whole training
};

/// One line of at most `width` columns; the bar takes what the figures leave, and the least
/// needed figures go first where even they do not fit.
std::string render_progress(const ProgressState& state, std::size_t width);

/// "0:07", "1:02:03".
std::string format_seconds(double seconds);

/// Draws the line over itself, at most ten times a second, where `out` is a terminal; else does
/// nothing.
class ProgressBar {
 public:
  explicit ProgressBar(std::FILE* out);
  void update(const ProgressState& state);
  /// Removes the line, so that others can print.
  void clear();

 private:
  std::FILE* out_;
  bool on_terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point next_draw_;
};

}  // namespace train
