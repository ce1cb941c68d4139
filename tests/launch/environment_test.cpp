#include "launch/environment.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <map>
#include <vector>

namespace lockstep {
namespace {

using Values = std::map<std::string, std::string>;

/// Variables of the environment for the length of a test, and none of any launcher's else.
class Variables {
 public:
  explicit Variables(const Values& values) : values_(values) {
    for (const auto& [name, value] : values_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const auto& [name, value] : values_) ::unsetenv(name.c_str());
  }

 private:
  Values values_;
};

std::string refusal(const Values& values) {
  const Variables variables(values);
  try {
    init_dist();
    destroy_dist();
  } catch (const UsageError& error) {
    return error.text();
  } catch (const EngineError& error) {
    return error.text();
  }
  return "no error";
}

TEST(EnvironmentTest, nothing_set_is_the_solo_group) {
  EXPECT_EQ(infer_launcher(), Launcher::none);
  init_dist();
  EXPECT_TRUE(is_distributed());
  EXPECT_EQ(get_backend(), "solo");
  EXPECT_EQ(get_world_size(), 1);
  destroy_dist();
  EXPECT_FALSE(is_distributed());
}

TEST(EnvironmentTest, the_innermost_launcher_wins) {
  const Variables slurm(Values{{"SLURM_PROCID", "0"}});
  EXPECT_EQ(infer_launcher(), Launcher::slurm);
  const Variables torchrun(Values{{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(infer_launcher(), Launcher::pytorch);
  const Variables mpi(Values{{"PMI_RANK", "0"}});
  EXPECT_EQ(infer_launcher(), Launcher::mpi);
  const Variables own(Values{{"LOCKSTEP_SEGMENT", "3:0"}});
  EXPECT_EQ(infer_launcher(), Launcher::lockstep);
}

TEST(EnvironmentTest, contradictions_name_variable_and_value) {
  const Values good = {
      {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}};
  const auto with = [&](const std::string& name, const std::string& value) {
    auto values = good;
    values[name] = value;
    return refusal(values);
  };
  const auto without = [&](const std::string& name) {
    auto values = good;
    values.erase(name);
    return refusal(values);
  };
  EXPECT_EQ(without("WORLD_SIZE").rfind("WORLD_SIZE is not set", 0), 0U);
  EXPECT_EQ(without("RANK").rfind("RANK is not set", 0), 0U);
  EXPECT_EQ(with("RANK", "4"), "RANK is 4, but WORLD_SIZE is 4: ranks are 0 to 3");
  EXPECT_EQ(with("RANK", "two"), "RANK is 'two', not a whole number");
  EXPECT_EQ(with("RANK", "-1").rfind("RANK is -1; it must be from 0", 0), 0U);
  EXPECT_EQ(with("WORLD_SIZE", ""), "WORLD_SIZE is '', not a whole number");
  EXPECT_EQ(with("WORLD_SIZE", "0").rfind("WORLD_SIZE is 0; it must be from 1", 0), 0U);
  EXPECT_EQ(with("WORLD_SIZE", "99999999999"), "WORLD_SIZE is '99999999999', not a whole number");
  EXPECT_EQ(with("LOCAL_RANK", "9").rfind("LOCAL_RANK is 9, but LOCAL_WORLD_SIZE is 4", 0), 0U);
  // Complete, but nothing here can carry it: every engine says why.
  const std::string text = refusal(good);
  EXPECT_NE(text.find("no engine can join rank 1 of 4"), std::string::npos) << text;
  EXPECT_NE(text.find("LOCKSTEP_SEGMENT is not set"), std::string::npos) << text;
}

TEST(EnvironmentTest, segments_that_are_none) {
  const auto with = [](const std::string& segment) {
    return refusal({{"RANK", "0"},
                    {"WORLD_SIZE", "1"},
                    {"LOCAL_RANK", "0"},
                    {"LOCAL_WORLD_SIZE", "1"},
                    {"LOCKSTEP_SEGMENT", segment}});
  };
  for (const char* damaged : {"", "3", ":", "x:1", "3:", "3:zz", "-1:0", "3:0:0"}) {
    EXPECT_NE(with(damaged).find("not FD:NONCE"), std::string::npos) << damaged;
  }
  EXPECT_NE(with("999:0123456789abcdef").find("the descriptor is closed"), std::string::npos);
}

TEST(EnvironmentTest, timeouts_that_are_none) {
  for (const char* damaged : {"", "x", "-1", "0", "nan", "inf", "1e99", "5s"}) {
    EXPECT_NE(refusal({{"LOCKSTEP_TIMEOUT", damaged}}).find("LOCKSTEP_TIMEOUT is '"),
              std::string::npos)
        << damaged;
  }
  const Variables variables(Values{{"LOCKSTEP_TIMEOUT", "0.25"}});
  init_dist();
  EXPECT_EQ(default_group().timeout(), std::chrono::milliseconds(250));
  destroy_dist();
}

TEST(EnvironmentTest, instruction_sets_that_are_none) {
  EXPECT_EQ(refusal({{"LOCKSTEP_SIMD", "mmx"}}),
            "LOCKSTEP_SIMD is 'mmx'; it takes scalar, avx2 or avx512");
}

TEST(EnvironmentTest, unknown_backend_names_the_known) {
  try {
    init_dist({.backend = "smoke"});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_EQ(error.text(), "backend 'smoke' does not exist; use auto, shared, solo");
  }
  EXPECT_THROW(init_dist({.backend = "shared"}), EngineError);
  EXPECT_FALSE(is_distributed());
}

}  // namespace
}  // namespace lockstep
