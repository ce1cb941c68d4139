#pragma once

#include <gtest/gtest.h>

#include <string>

namespace lockstep::test {

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\n  lacks: " << part;
}

}  // namespace lockstep::test
