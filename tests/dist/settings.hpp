#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/expect.hpp"
#include "support/ranks.hpp"

namespace lockstep::test {

/// Alone, as threads and as processes, 1 to 4 ranks.
inline std::vector<Setting> few_ranks() {
  std::vector<Setting> all = {{Form::solo, 1}};
  for (const int n : {1, 2, 3, 4}) {
    all.push_back({Form::threads, n});
    all.push_back({Form::processes, n});
  }
  return all;
}

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

}  // namespace lockstep::test
