#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>

namespace train {

/// The contents of a progress line.
struct ProgressState {
  std::size_t epoch = 0;  ///< from 1
  std::size_t n_epochs = 0;
  std::size_t step = 0;  ///< steps done in this epoch
  std::size_t n_steps = 0;
  double loss = 0;
  double images_per_second = 0;
  double seconds_left = 0;  ///< until the end of the training
};

/// One line of at most `width` columns. The bar fills the space that the figures leave; if the
/// figures do not fit, the least important are dropped first.
std::string render_progress(const ProgressState& state, std::size_t width);

/// "0:07", "1:02:03".
std::string format_seconds(double seconds);

/// Redraws the line in place, at most ten times a second, if `out` is a terminal; otherwise does
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
