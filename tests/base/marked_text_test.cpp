#include "base/marked_text.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>

namespace lockstep::base {
namespace {

std::string marked_copy_of(std::string_view text) {
  std::array<char, 64> array;
  array.fill('?');
  copy_marked_text(array, text);
  return std::string(text_in(array));
}

TEST(MarkedTextTest, a_text_that_fits_has_no_mark) {
  EXPECT_EQ(marked_copy_of(""), "");
  EXPECT_EQ(marked_copy_of("out of sheets"), "out of sheets");
  EXPECT_EQ(marked_copy_of(std::string(63, 'x')), std::string(63, 'x'));
}

TEST(MarkedTextTest, a_text_that_does_not_fit_ends_with_the_mark) {
  const std::string mark(kCutMark);
  const std::size_t n = 63 - mark.size();
  EXPECT_EQ(marked_copy_of(std::string(64, 'x')), std::string(n, 'x') + mark);
  EXPECT_EQ(marked_copy_of(std::string(40'000, 'x')), std::string(n, 'x') + mark);
  // A character of UTF-8 is whole, or not there.
  EXPECT_EQ(marked_copy_of(std::string(n - 1, 'x') + "\u00e9" + std::string(64, 'y')),
            std::string(n - 1, 'x') + mark);
}

}  // namespace
}  // namespace lockstep::base
