#include "engines/catalog.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "world/environment.hpp"

namespace lockstep::engines {
namespace {

/// A variable with another value, or none, for as long as it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) {
    value == nullptr ? ::unsetenv(name_) : ::setenv(name_, value, /*overwrite=*/1);
  }

  const char* name_;
  std::optional<std::string> before_;
};

Availability of(std::string_view name, const internal::World& world) {
  for (const Entry& entry : catalog()) {
    if (entry.name == name) return entry.available(world);
  }
  return {};
}

Availability of_mpi(Launcher launcher) {
  internal::World world;
  world.launcher = launcher;
  world.size = 2;
  world.mpi = internal::find_mpi(launcher, Env::read());
  return of("mpi", world);
}

// mpirun -npernode 1 lockstep run --nnodes ..., srun torchrun ...: every rank has the variables of
// the one that started its launcher, and MPI_Init would never return.
TEST(CatalogTest, mpi_is_not_for_ranks_that_another_launcher_started) {
  const Variable none("LOCKSTEP_MPI", nullptr);
  const Variable size("OMPI_COMM_WORLD_SIZE", "2");
  for (const Launcher launcher : {Launcher::lockstep, Launcher::pytorch}) {
    const Availability got = of_mpi(launcher);
    EXPECT_FALSE(got.is_available);
    EXPECT_EQ(got.reason, "needs ranks that mpirun (or srun with PMIx) started");
  }
  for (const Launcher launcher : {Launcher::mpi, Launcher::slurm}) {
    const Availability got = of_mpi(launcher);
    EXPECT_TRUE(got.is_available || got.reason.find("its module") != std::string::npos)
        << got.reason;
  }
}

TEST(CatalogTest, a_module_in_the_environment_is_not_for_ranks_of_lockstep_run) {
  const Variable module("LOCKSTEP_MPI", "/proc/self/exe");  // a file that exists
  EXPECT_FALSE(of_mpi(Launcher::lockstep).is_available);
  EXPECT_TRUE(of_mpi(Launcher::mpi).is_available);
}

TEST(CatalogTest, hierarchical_takes_an_engine_between_hosts) {
  internal::World world;
  world.size = 2;
  const Availability without = of("hierarchical", world);
  EXPECT_FALSE(without.is_available);
  EXPECT_EQ(without.reason,
            "needs an engine between hosts, ucx, mpi or (with libtorch) gloo, and more than one "
            "rank");
  world.mpi = "/proc/self/exe";  // a file that exists
  EXPECT_TRUE(of("hierarchical", world).is_available);
}

}  // namespace
}  // namespace lockstep::engines
