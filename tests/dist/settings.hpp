#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/expect.hpp"
#include "support/ranks.hpp"

namespace lockstep::test {

/// Alone, as threads and as processes, 1 to 4 ranks, but no fewer than `fewest`.
inline std::vector<Setting> few_ranks(int fewest = 1) {
  std::vector<Setting> all;
  if (fewest == 1) all.push_back({Form::solo, 1});
  for (int n = fewest; n <= 4; ++n) {
    all.push_back({Form::threads, n});
    all.push_back({Form::processes, n});
  }
  return all;
}

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

}  // namespace lockstep::test
