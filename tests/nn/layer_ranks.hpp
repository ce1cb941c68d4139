#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "helpers.hpp"

/// Ranks that are threads of this process, over each of what the messages of a layer go through.
namespace lockstep::nn::testing {

/// Runs body(rank) as each of n ranks.
using Run = std::function<void(int n, const std::function<void(int rank)>& body)>;

/// Ranks on hosts of two and three ranks.
void on_hosts(int n, const std::function<void(int rank)>& body);
/// Ranks whose default group, "mine", is one over a process group of Gloo that they have made.
void on_gloo(int n, const std::function<void(int rank)>& body);

struct Over {
  const char* name;
  Run run;
};
void PrintTo(const Over& over, std::ostream* out);

/// A test of a layer, over each of over_each(). `on`: as on_ranks.
class LayerTest : public ::testing::TestWithParam<Over> {
 protected:
  static void on(int n, const std::function<void(int rank)>& body) { GetParam().run(n, body); }
};
std::vector<Over> over_each();
inline std::string name_of(const ::testing::TestParamInfo<Over>& over) { return over.param.name; }

}  // namespace lockstep::nn::testing
