#include "train/options.hpp"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

namespace train {
namespace {

/// What is said of a command line; empty where nothing is wrong with it.
std::string refusal_of(std::vector<std::string> words) {
  CLI::App app;
  Options options;
  add_options(app, options);
  std::reverse(words.begin(), words.end());
  try {
    app.parse(words);
    return {};
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
}

TEST(OptionsTest, what_no_number_can_mean_is_rejected) {
  for (const char* const flag : {"--lr", "--momentum", "--weight-decay"}) {
    for (const char* const value : {"nan", "inf", "-inf", "-0.1", "1e999", "x"}) {
      EXPECT_NE(refusal_of({flag, value}), "") << flag << " " << value;
    }
    EXPECT_EQ(refusal_of({flag, "0"}), "");
    EXPECT_EQ(refusal_of({flag, "1e-3"}), "");
  }
  EXPECT_NE(refusal_of({"--lr", "nan"}).find("got 'nan', expected a number from 0"),
            std::string::npos);
  for (const char* const flag : {"--seed", "--epochs", "--max-steps", "--classes", "--batch",
                                 "--data-parallel", "--metrics-every"}) {
    for (const char* const value : {"-1", "1.5", "99999999999999999999", "x"}) {
      EXPECT_NE(refusal_of({flag, value}), "") << flag << " " << value;
    }
    EXPECT_EQ(refusal_of({flag, "1"}), "");
  }
  EXPECT_NE(refusal_of({"--seed", "-1"}).find("got '-1', expected a whole number from 0"),
            std::string::npos);
  EXPECT_NE(refusal_of({"--shares", "5,-1"}), "");
  EXPECT_EQ(refusal_of({"--shares", "5,2,1", "--seed", "18446744073709551615"}), "");
}

}  // namespace
}  // namespace train
