// The engines over which the suite runs. To add one, add a line to `settings`.

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "conformance/conformance.hpp"

namespace lockstep::test {
namespace {

std::vector<Setting> settings() {
#ifdef LOCKSTEP_CONFORMANCE_GLOO  // in nn_tests: not in core_tests
  return {{Form::gloo, 1}, {Form::gloo, 2},       {Form::gloo, 3},      {Form::gloo, 4},
          {Form::gloo, 8}, {Form::gloo_hosts, 3}, {Form::gloo_hosts, 4}};
#endif
#ifdef LOCKSTEP_CONFORMANCE_ENGINE  // in tests/consumer: over the engine of examples/engine
  return {{Form::threads, 1}, {Form::threads, 2}, {Form::threads, 3}, {Form::threads, 4}};
#endif
  // Under mpirun: `LOCKSTEP_TEST_BACKEND=mpi mpirun -n 3 core_tests --gtest_filter=*/launched`.
  if (std::getenv("LOCKSTEP_TEST_BACKEND") != nullptr) return {{Form::launched, 0}};
  std::vector<Setting> all = {{Form::solo, 1}};
  for (const int n : {1, 2, 3, 4, 8}) {
    all.push_back({Form::threads, n});
    all.push_back({Form::processes, n});
    if (n > 1) all.push_back({Form::hosts, n});
  }
  // Without levels, and with two of them, in which a part has one rank.
  for (const int n : {3, 9}) all.push_back({Form::messages, n});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Engines, Conformance, ::testing::ValuesIn(settings()),
                         [](const auto& setting) { return name_of(setting.param); });

std::vector<Setting> local_settings() {
#ifdef LOCKSTEP_CONFORMANCE_ENGINE  // whose ranks have a group and no world
  return {};
#endif
  std::vector<Setting> all = settings();
  std::erase_if(all, [](const Setting& setting) { return setting.form == Form::launched; });
  return all;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LocalConformance);
INSTANTIATE_TEST_SUITE_P(Engines, LocalConformance, ::testing::ValuesIn(local_settings()),
                         [](const auto& setting) { return name_of(setting.param); });

}  // namespace
}  // namespace lockstep::test
