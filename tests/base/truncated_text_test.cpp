#include "base/truncated_text.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>

namespace lockstep::base {
namespace {

std::string truncated_copy_of(std::string_view text) {
  std::array<char, 64> array;
  array.fill('?');
  copy_truncated(array, text);
  return std::string(text_in(array));
}

TEST(TruncatedTextTest, short_text_is_unchanged) {
  EXPECT_EQ(truncated_copy_of(""), "");
  EXPECT_EQ(truncated_copy_of("out of sheets"), "out of sheets");
  EXPECT_EQ(truncated_copy_of(std::string(63, 'x')), std::string(63, 'x'));
}

TEST(TruncatedTextTest, long_text_is_truncated) {
  const std::string mark(kTruncationMark);
  const std::size_t n = 63 - mark.size();
  EXPECT_EQ(truncated_copy_of(std::string(64, 'x')), std::string(n, 'x') + mark);
  EXPECT_EQ(truncated_copy_of(std::string(40'000, 'x')), std::string(n, 'x') + mark);
  // A character of UTF-8 is whole, or not there.
  EXPECT_EQ(truncated_copy_of(std::string(n - 1, 'x') + "\u00e9" + std::string(64, 'y')),
            std::string(n - 1, 'x') + mark);
}

}  // namespace
}  // namespace lockstep::base
