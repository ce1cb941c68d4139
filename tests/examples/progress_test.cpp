#include "train/progress.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace train {
namespace {

const ProgressState kState{.epoch = 3,
                           .n_epochs = 10,
                           .step = 90,
                           .n_steps = 180,
                           .loss = 0.25,
                           .images_per_second = 1234.4,
                           .seconds_left = 61.2};

TEST(ProgressTest, shows_everything_on_a_wide_line) {
  EXPECT_EQ(render_progress(kState, 79),
            "epoch 3/10 [#############..............]  loss 0.2500  1:02 left  1234 images/s");
}

TEST(ProgressTest, never_wider_than_the_terminal) {
  for (std::size_t width = 0; width < 200; ++width) {
    const std::string line = render_progress(kState, width);
    EXPECT_LE(line.size(), width);
    if (width >= 10) {
      EXPECT_EQ(line.substr(0, 10), "epoch 3/10");
    }
  }
  EXPECT_EQ(render_progress(kState, 30), "epoch 3/10  loss 0.2500");
}

TEST(ProgressTest, bar_fills_up) {
  ProgressState state = kState;
  state.step = 0;
  EXPECT_NE(render_progress(state, 79).find("[..."), std::string::npos);
  state.step = state.n_steps;
  EXPECT_NE(render_progress(state, 79).find("###]"), std::string::npos);
}

TEST(ProgressTest, time_left) {
  EXPECT_EQ(format_seconds(0), "0:00");
  EXPECT_EQ(format_seconds(6.1), "0:07");
  EXPECT_EQ(format_seconds(3723), "1:02:03");
  EXPECT_EQ(format_seconds(-1), "-:--");
  EXPECT_EQ(format_seconds(std::nan("")), "-:--");
  EXPECT_EQ(format_seconds(INFINITY), "-:--");
}

}  // namespace
}  // namespace train
