#include "world/environment.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <map>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "support/expect.hpp"
#include "support/ranks.hpp"

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
  EXPECT_EQ(test::in_a_fork([] {
              EXPECT_EQ(infer_launcher(), Launcher::none);
              init_dist();
              EXPECT_TRUE(is_distributed());
              EXPECT_EQ(get_backend(), "solo");
              EXPECT_EQ(get_world_size(), 1);
              destroy_dist();
              EXPECT_FALSE(is_distributed());
            }),
            0);
}

// What each launcher sets, as the real ones do (tests/cli/launchers_test.cpp runs those).
const Values kTorchrun = {
    {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}};
const Values kSrun = {{"SLURM_JOB_ID", "7"},         {"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "8"},         {"SLURM_NTASKS", "9"},
                      {"SLURM_STEP_NUM_TASKS", "9"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2),1"},
                      {"SLURM_LOCALID", "0"},        {"SLURM_NODEID", "2"}};
const Values kBatchScript = {{"SLURM_JOB_ID", "7"},  {"SLURM_PROCID", "0"},
                             {"SLURM_NTASKS", "3"},  {"SLURM_TASKS_PER_NODE", "3"},
                             {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}};
const Values kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                         {"PMIX_RANK", "2"},
                         {"PMIX_NAMESPACE", "1467613185"}};
const Values kMpich = {
    {"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

Values operator+(Values values, const Values& more) {
  for (const auto& [name, value] : more) values[name] = value;
  return values;
}

struct Seen {
  Launcher launcher;
  int rank, size, local_rank, local_size;
  bool operator==(const Seen&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Seen& seen) {
  return out << name_of(seen.launcher) << ": rank " << seen.rank << " of " << seen.size
             << ", local " << seen.local_rank << " of " << seen.local_size;
}

Seen seen(const Values& values) {
  const Variables variables(values);
  const internal::World world = internal::read_world(infer_launcher());
  return {world.launcher, world.rank, world.size, world.local_rank, world.local_size};
}

TEST(EnvironmentTest, every_launcher_gives_its_four_numbers) {
  EXPECT_EQ(seen(kTorchrun), (Seen{Launcher::pytorch, 1, 4, 1, 4}));
  EXPECT_EQ(seen(kTorchrun + Values{{"LOCKSTEP_SEGMENT", "3:0"}}),
            (Seen{Launcher::lockstep, 1, 4, 1, 4}));
  EXPECT_EQ(seen(kSrun), (Seen{Launcher::slurm, 8, 9, 0, 1}));
  EXPECT_EQ(seen(kSrun + Values{{"SLURM_PROCID", "5"}, {"SLURM_NODEID", "1"}}),
            (Seen{Launcher::slurm, 5, 9, 0, 4}));
  EXPECT_EQ(seen(kOpenMpi), (Seen{Launcher::mpi, 2, 3, 0, 1}));
  EXPECT_EQ(seen(kMpich), (Seen{Launcher::mpi, 2, 3, 1, 2}));
}

TEST(EnvironmentTest, a_step_may_be_smaller_than_its_allocation) {
  EXPECT_EQ(seen(kSrun + Values{{"SLURM_NTASKS", "64"}, {"SLURM_TASKS_PER_NODE", "64"}}),
            (Seen{Launcher::slurm, 8, 9, 0, 1}));
}

TEST(EnvironmentTest, a_batch_script_runs_once) {
  EXPECT_EQ(seen(kBatchScript), (Seen{Launcher::none, 0, 1, 0, 1}));
}

TEST(EnvironmentTest, the_innermost_launcher_wins) {
  const Values own = {{"LOCKSTEP_SEGMENT", "3:0"}};
  EXPECT_EQ(seen(kSrun + kOpenMpi).launcher, Launcher::mpi);
  EXPECT_EQ(seen(kSrun + kMpich).launcher, Launcher::mpi);
  EXPECT_EQ(seen(kBatchScript + kMpich).launcher, Launcher::mpi);
  EXPECT_EQ(seen(kSrun + kTorchrun + Values{{"TORCHELASTIC_RUN_ID", "none"}}),
            (Seen{Launcher::pytorch, 1, 4, 1, 4}));
  EXPECT_EQ(seen(kBatchScript + kTorchrun).launcher, Launcher::pytorch);
  EXPECT_EQ(seen(kSrun + kTorchrun + own).launcher, Launcher::lockstep);
  EXPECT_EQ(seen(kOpenMpi + kTorchrun + own).launcher, Launcher::lockstep);
  EXPECT_EQ(seen(kMpich + kTorchrun + own).launcher, Launcher::lockstep);
  EXPECT_EQ(seen(kOpenMpi + kTorchrun + Values{{"WORLD_SIZE", "3"}}),
            (Seen{Launcher::mpi, 2, 3, 0, 1}));
}

TEST(EnvironmentTest, sruns_own_pmi_is_srun) {
  EXPECT_EQ(seen(kSrun + Values{{"PMI_RANK", "8"}, {"PMI_SIZE", "9"}}).launcher, Launcher::slurm);
  EXPECT_EQ(seen(kSrun + Values{{"PMIX_RANK", "8"}}).launcher, Launcher::slurm);
}

TEST(EnvironmentTest, leftovers_of_another_size_are_named_with_the_launchers) {
  for (const Values& mpi : {kOpenMpi, kMpich}) {
    const std::string text = refusal(mpi + kTorchrun);
    test::expect_contains(text, "SIZE is 3, but WORLD_SIZE is 4");
    test::expect_contains(text, "mpirun's and torchrun's");
  }
  EXPECT_NE(refusal(kSrun + kTorchrun).find("SLURM_STEP_NUM_TASKS is 9, but WORLD_SIZE is 4"),
            std::string::npos);
  // Who chooses the launcher is not asked.
  const Variables variables(kMpich + kTorchrun);
  EXPECT_EQ(internal::read_world(Launcher::mpi).size, 3);
  EXPECT_EQ(internal::read_world(Launcher::pytorch).size, 4);
}

TEST(EnvironmentTest, pmix_alone_has_no_size) {
  EXPECT_NE(refusal({{"PMIX_RANK", "2"}}).find("PMIX_RANK is 2, but PMIx has no variable for"),
            std::string::npos);
}

TEST(EnvironmentTest, jobs_that_run_at_once_differ_and_their_ranks_do_not) {
  const auto job = [](const Values& values) {
    const Variables variables(values);
    return internal::read_world(infer_launcher()).job;
  };
  const Values other_rank = {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}, {"PMIX_RANK", "0"}};
  EXPECT_FALSE(job(kSrun).empty());
  EXPECT_EQ(job(kSrun), job(kSrun + other_rank));
  EXPECT_NE(job(kSrun), job(kSrun + Values{{"SLURM_STEP_ID", "1"}}));
  EXPECT_NE(job(kSrun), job(kSrun + Values{{"SLURM_JOB_ID", "8"}}));  // its array's next task
  EXPECT_EQ(job(kOpenMpi), job(kOpenMpi + other_rank));
  EXPECT_NE(job(kOpenMpi), job(kOpenMpi + Values{{"PMIX_NAMESPACE", "1"}}));
  const Values port = {{"MASTER_PORT", "29500"}};
  EXPECT_NE(job(kTorchrun + port), job(kTorchrun + Values{{"MASTER_PORT", "29501"}}));
}

TEST(EnvironmentTest, invalid_task_lists) {
  const auto with = [](const std::string& name, const std::string& value) {
    return refusal(kSrun + Values{{name, value}});
  };
  for (const char* damaged : {"", "x", "4(x2", "4(x2)1", "4(x2),", "4(x0),1", "0(x2),9", "4x2,1",
                              " 4(x2),1", "4(x999999999),1", "99999999999", "-4(x2),17"}) {
    EXPECT_EQ(with("SLURM_STEP_TASKS_PER_NODE", damaged),
              "SLURM_STEP_TASKS_PER_NODE is '" + std::string(damaged) +
                  "'; Slurm writes the tasks per node as in 4(x2),1");
  }
  EXPECT_EQ(with("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            "SLURM_STEP_TASKS_PER_NODE is 4(x2), which makes 8 tasks, but SLURM_STEP_NUM_TASKS is "
            "9");
  EXPECT_EQ(with("SLURM_NODEID", "3"),
            "SLURM_NODEID is 3, but SLURM_STEP_TASKS_PER_NODE is 4(x2),1: nodes are 0 to 2");
  EXPECT_EQ(with("SLURM_LOCALID", "1"),
            "SLURM_LOCALID is 1, but SLURM_STEP_TASKS_PER_NODE=4(x2),1 at SLURM_NODEID=2 is 1: "
            "local ranks are 0 to 0");
  EXPECT_EQ(with("SLURM_PROCID", "9"),
            "SLURM_PROCID is 9, but SLURM_STEP_NUM_TASKS is 9: ranks are 0 to 8");
}

TEST(EnvironmentTest, every_variable_of_every_launcher_is_missed_and_checked) {
  for (const Values& all : {kTorchrun, kOpenMpi, kMpich}) {
    for (const auto& [name, value] : all) {
      if (name.starts_with("PMIX")) continue;
      Values rest = all;
      rest.erase(name);
      rest.erase("PMIX_RANK");
      EXPECT_EQ(refusal(rest).rfind(name + " is not set", 0), 0U) << refusal(rest);
      EXPECT_EQ(refusal(all + Values{{name, "1e3"}}), name + " is '1e3', not a whole number");
      EXPECT_EQ(refusal(all + Values{{name, "-1"}}).rfind(name + " is -1; it must be from", 0), 0U);
    }
  }
}

TEST(EnvironmentTest, contradictions_name_variable_and_value) {
  const Values& good = kTorchrun;
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
  EXPECT_EQ(with("LOCAL_WORLD_SIZE", "5"),
            "LOCAL_WORLD_SIZE is 5, but WORLD_SIZE is 4: a host cannot have more ranks than the "
            "world");
  EXPECT_EQ(with("MASTER_PORT", "http"), "MASTER_PORT is 'http', not a whole number");
  EXPECT_EQ(with("MASTER_PORT", "65536"), "MASTER_PORT is 65536; it must be from 1 to 65535");
  // Complete, but nothing here can carry it: every engine says why.
  const std::string text = refusal(good);
  test::expect_contains(text, "no engine can join rank 1 of 4");
  test::expect_contains(text, "LOCKSTEP_SEGMENT is not set");
}

TEST(EnvironmentTest, invalid_segments) {
  const auto with = [](const std::string& segment) {
    return refusal({{"RANK", "0"},
                    {"WORLD_SIZE", "1"},
                    {"LOCAL_RANK", "0"},
                    {"LOCAL_WORLD_SIZE", "1"},
                    {"LOCKSTEP_SEGMENT", segment}});
  };
  for (const char* damaged : {"", "3", ":", "x:1", "3:", "3:zz", "-1:0", "3:0:x", "3:0:-1"}) {
    EXPECT_NE(with(damaged).find("not FD:NONCE"), std::string::npos) << damaged;
  }
  EXPECT_NE(with("999:0123456789abcdef").find("the descriptor is closed"), std::string::npos);
}

// As tests/fuzz/environment_fuzz.cpp, which finds its own values.
TEST(EnvironmentTest, random_values_give_a_valid_world_or_an_error) {
  const std::vector<std::string> parts = {"0", "1",   "2", "4",  "9",   "-1", "(x", ")",
                                          ",", "(x2", "x", "1e", "0.5", "=",  "",   "16777216"};
  const std::vector<Launcher> launchers = {Launcher::lockstep, Launcher::pytorch, Launcher::slurm,
                                           Launcher::mpi};
  std::mt19937 random(3);
  int n_worlds = 0;
  for (int i = 0; i < 4000; ++i) {
    Values values = (std::vector{kTorchrun, kSrun, kOpenMpi, kMpich})[random() % 4];
    for (auto& [name, value] : values) {
      if (random() % 8 != 0) continue;
      value.clear();
      for (auto n = random() % 4; n > 0; --n) value += parts[random() % parts.size()];
    }
    const Variables variables(values);
    try {
      const internal::World world = internal::read_world(launchers[random() % launchers.size()]);
      EXPECT_TRUE(world.rank >= 0 && world.rank < world.size);
      EXPECT_TRUE(world.local_rank >= 0 && world.local_rank < world.local_size);
      EXPECT_LE(world.local_size, world.size);
      ++n_worlds;
    } catch (const UsageError&) {
    }
  }
  EXPECT_GT(n_worlds, 100);
}

TEST(EnvironmentTest, invalid_timeouts) {
  for (const char* damaged : {"", "x", "-1", "0", "nan", "inf", "1e99", "5s"}) {
    EXPECT_NE(refusal({{"LOCKSTEP_TIMEOUT", damaged}}).find("LOCKSTEP_TIMEOUT is '"),
              std::string::npos)
        << damaged;
  }
  {
    const Variables variables(Values{{"LOCKSTEP_TIMEOUT", "0.0001"}});
    EXPECT_EQ(Env::read().timeout, std::chrono::milliseconds(1));
  }
  const Variables variables(Values{{"LOCKSTEP_TIMEOUT", "0.25"}});
  EXPECT_EQ(test::in_a_fork([] {
              init_dist();
              EXPECT_EQ(default_group().timeout(), std::chrono::milliseconds(250));
              destroy_dist();
              init_dist({.timeout = std::chrono::seconds(7)});
              EXPECT_EQ(default_group().timeout(), std::chrono::seconds(7)) << "the program's own";
              destroy_dist();
            }),
            0);
}

TEST(EnvironmentTest, invalid_levels_and_instruction_sets) {
  EXPECT_EQ(refusal({{"LOCKSTEP_CHECK", "most"}}),
            "LOCKSTEP_CHECK is 'most'; it takes off, light or full");
  EXPECT_EQ(refusal({{"LOCKSTEP_SIMD", "mmx"}}),
            "LOCKSTEP_SIMD is 'mmx'; it takes scalar, avx2 or avx512");
}

TEST(EnvironmentTest, invalid_thresholds) {
  EXPECT_EQ(refusal({{"LOCKSTEP_TUNE", "chunk=64K"}}).rfind("LOCKSTEP_TUNE has 'chunk=64K'", 0),
            0U);
}

TEST(EnvironmentTest, the_network_is_ignored) {
  const auto join = [] { EXPECT_EQ(refusal({{"LOCKSTEP_NETWORK", "25us"}}), "no error"); };
  EXPECT_EQ(test::in_a_fork(join), 0);  // a process that has joined is another to later tests
}

TEST(EnvironmentTest, unknown_backend_names_the_known) {
  try {
    init_dist({.backend = "smoke"});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_EQ(error.text(),
              "backend 'smoke' does not exist; use auto, shared, hierarchical, ucx, mpi, solo");
  }
  EXPECT_THROW(init_dist({.backend = "shared"}), EngineError);
  EXPECT_FALSE(is_distributed());
}

}  // namespace
}  // namespace lockstep
