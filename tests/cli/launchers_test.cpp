#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "cli/intel_mpi.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

constexpr const char* kResult =
    "items 1001, sum 333833500, mean 333500.000, largest 1000000, agreed, in order";

/// `name` with its path, or empty where there is no such program.
std::string program(const std::string& name) {
  for (const char* folder : {"/usr/local/bin/", "/usr/bin/", "/usr/sbin/", "/bin/"}) {
    if (access((folder + name).c_str(), X_OK) == 0) return folder + name;
  }
  return {};
}

#define SKIP_WITHOUT(name)                                                     \
  if (program(name).empty()) {                                                 \
    GTEST_SKIP() << "there is no " << (name) << "; ./dev setup installs what " \
                 << "tests run against";                                       \
  }                                                                            \
  static_assert(true)

/// Runs a shell line and waits for its end. $LOCKSTEP is the command, $EVALUATE the program.
Ended run_line(const std::string& line, std::map<std::string, std::string> variables = {}) {
  variables.emplace("EVALUATE", EVALUATE_PROGRAM);
  variables.emplace("LOCKSTEP", LOCKSTEP_COMMAND);
  variables.emplace("LOCKSTEP_TIMEOUT", "30");
  Command command(StartOptions{.variables = variables, .shell = line});
  return command.wait();
}

void expect_lines(const std::string& text, const std::string& part, int times) {
  const std::vector<std::string> lines = lines_of(text);
  const auto n_found = std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
    return line.find(part) != std::string::npos;
  });
  EXPECT_EQ(n_found, times) << "of '" << part << "' in: " << text;
}

/// It printed the result once, and its ranks say who started them.
void expect_result(const Ended& ended, int n_ranks, const std::string& launcher) {
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  expect_lines(ended.out, kResult, 1);
  for (int rank = 0; rank < n_ranks; ++rank) {
    expect_lines(ended.err,
                 fmt::format("rank {} of {}, local {} of {}, by {}, over ", rank, n_ranks, rank,
                             n_ranks, launcher),
                 1);
  }
}

const std::string kOpenMpiRun =
    "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none -n 3 ";
const std::string kMpichRun = "mpirun.mpich -n 3 ";
// Debian 12's torchrun fails under its Python where all ranks' output goes where it goes by itself.
const std::string kTorchrunAlone = "torchrun --redirects 9:1 --tee 9:1 ";
const std::string kTorchrun = kTorchrunAlone + "--standalone --no_python --nproc_per_node 3 ";

TEST(LaunchersTest, one_program_alone_as_threads_and_under_lockstep_run) {
  expect_result(run_line("\"$EVALUATE\""), 1, "none");
  expect_result(run_line("\"$EVALUATE\" threads 3"), 3, "threads");
  expect_result(run_line("\"$LOCKSTEP\" run -n 3 \"$EVALUATE\""), 3, "lockstep run");
}

TEST(LaunchersTest, one_program_under_open_mpi) {
  SKIP_WITHOUT("mpirun.openmpi");
  expect_result(run_line(kOpenMpiRun + "\"$EVALUATE\""), 3, "mpirun");
}

TEST(LaunchersTest, one_program_under_mpich) {
  SKIP_WITHOUT("mpirun.mpich");
  expect_result(run_line(kMpichRun + "\"$EVALUATE\""), 3, "mpirun");
  // A shell stands between the launcher and the rank.
  expect_result(run_line(kMpichRun + "sh -c '\"$EVALUATE\"; exit $?'"), 3, "mpirun");
}

TEST(LaunchersTest, one_program_under_intel_mpi) {
  if (intel_mpiexec().empty()) GTEST_SKIP() << kNoIntelMpi;
  const std::string run = intel_mpiexec() + " -n 3 ";
  expect_result(run_line(run + "\"$EVALUATE\""), 3, "mpirun");
  expect_result(run_line(run + "sh -c '\"$EVALUATE\"; exit $?'"), 3, "mpirun");
  expect_result(run_line(intel_mpiexec() + " -n 1 \"$LOCKSTEP\" run -n 3 \"$EVALUATE\""), 3,
                "lockstep run");
}

TEST(LaunchersTest, one_program_under_torchrun) {
  SKIP_WITHOUT("torchrun");
  expect_result(run_line(kTorchrun + "\"$EVALUATE\""), 3, "torchrun");
}

TEST(LaunchersTest, lockstep_run_inside_mpirun) {
  SKIP_WITHOUT("mpirun.mpich");
  expect_result(run_line("mpirun.mpich -n 1 \"$LOCKSTEP\" run -n 3 \"$EVALUATE\""), 3,
                "lockstep run");
}

TEST(LaunchersTest, mpirun_under_leftovers_of_torchrun) {
  SKIP_WITHOUT("mpirun.mpich");
  const TemporaryFolder outputs;
  const auto with_size = [&](const std::string& line, const char* size) {
    return run_line(kMpichRun + line, {{"OUTPUTS", outputs.path()},
                                       {"RANK", "0"},
                                       {"WORLD_SIZE", size},
                                       {"LOCAL_RANK", "0"},
                                       {"LOCAL_WORLD_SIZE", size}});
  };
  expect_result(with_size("\"$EVALUATE\"", "3"), 3, "mpirun");
  // To files: mpirun may lose what a rank wrote just before it failed.
  const Ended ended = with_size("sh -c '\"$EVALUATE\" >\"$OUTPUTS/$$\"'", "2");
  EXPECT_NE(ended.exit_code, 0);
  std::string said;
  for (const auto& output : std::filesystem::directory_iterator(outputs.path())) {
    said += contents_of(output.path());
  }
  expect_contains(said, "PMI_SIZE is 3, but WORLD_SIZE is 2");
}

/// The n-th shell script of a page of docs/launchers, with other names for some programs.
std::string script_of(const std::string& page, int n,
                      const std::map<std::string, std::string>& names = {}) {
  const std::string text = contents_of(std::string(LAUNCHER_DOCS) + "/" + page);
  std::size_t at = 0;
  for (int i = 0; i <= n; ++i) at = text.find("```sh\n", at) + 6;
  std::string script = text.substr(at, text.find("```", at) - at);
  for (const auto& [name, other] : names) {
    for (at = script.find(name); at != std::string::npos; at = script.find(name, at + other.size()))
      script.replace(at, name.size(), other);
  }
  return script;
}

/// A folder with the script as `job` and $EVALUATE as `train`.
void write_job(const TemporaryFolder& folder, const std::string& script) {
  std::ofstream(folder / "job") << script;
  std::filesystem::create_symlink(EVALUATE_PROGRAM, folder / "train");
}

struct Page {
  const char* file;
  int n_th;
  const char* needs;
  std::map<std::string, std::string> names;
  int n_ranks;
  const char* launcher;
};

TEST(LaunchersTest, scripts_of_the_documentation) {
  for (const Page& page :
       {Page{"openmpi.md", 0, "mpirun.openmpi", {{"mpirun ", "mpirun.openmpi "}}, 4, "mpirun"},
        Page{"mpich.md", 0, "mpiexec.mpich", {{"mpiexec ", "mpiexec.mpich "}}, 4, "mpirun"},
        Page{"torchrun.md", 0, "torchrun", {{"torchrun ", kTorchrunAlone}}, 4, "torchrun"},
        Page{"torchrun.md", 1, "sh", {}, 2, "torchrun"}}) {
    if (program(page.needs).empty()) continue;  // the tests above say so
    SCOPED_TRACE(page.file);
    const TemporaryFolder folder;
    write_job(folder, script_of(page.file, page.n_th, page.names));
    expect_result(
        run_line("cd \"$FOLDER\" && sh job", {{"FOLDER", folder / "."},
                                              {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                              {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                              {"OMPI_MCA_rmaps_base_oversubscribe", "1"}}),
        page.n_ranks, page.launcher);
  }
}

/// A cluster of its own for the tests below.
class SlurmTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    for (const char* name : {"slurmctld", "slurmd", "srun", "munged"}) {
      if (program(name).empty()) missing_ = fmt::format("there is no {}; ./dev setup", name);
    }
    if (geteuid() != 0) missing_ = "only root can start slurmd";
    if (!missing_.empty()) return;
    folder_ = std::make_unique<TemporaryFolder>();
    cluster_ = std::make_unique<Command>(
        StartOptions{.variables = {{"FOLDER", *folder_ / "slurm"}},
                     .shell = "exec bash '" SLURM_CLUSTER "' \"$FOLDER\""});
    cluster_->read_until("ready");
  }

  static void TearDownTestSuite() {
    if (cluster_) {
      cluster_->send(SIGTERM);
      EXPECT_EQ(cluster_->wait().exit_code, 0);
      EXPECT_TRUE(cluster_->processes().empty());
    }
    cluster_.reset();
    folder_.reset();
  }

  void SetUp() override {
    if (!missing_.empty()) GTEST_SKIP() << missing_;
  }

  static Ended run_in_cluster(const std::string& line) {
    return run_line(line,
                    {{"SLURM_CONF", *folder_ / "slurm/slurm.conf"}, {"FOLDER", *folder_ / "."}});
  }
  static std::string file(const std::string& name) { return contents_of(*folder_ / name); }

 private:
  static inline std::string missing_;
  static inline std::unique_ptr<TemporaryFolder> folder_;
  static inline std::unique_ptr<Command> cluster_;
};

TEST_F(SlurmTest, one_program_under_srun) {
  expect_result(run_in_cluster("srun -n 3 \"$EVALUATE\""), 3, "Slurm");
  expect_result(run_in_cluster("srun --mpi=pmi2 -n 3 \"$EVALUATE\""), 3, "Slurm");
}

// Waits by the files: sbatch --wait looks every ten seconds only.
TEST_F(SlurmTest, an_array_of_jobs_that_run_at_once) {
  const Ended ended = run_in_cluster(
      "sbatch --array=0-1 -n 2 -o \"$FOLDER/array-%a.out\" -e \"$FOLDER/array-%a.err\" --wrap "
      "'srun \"$EVALUATE\"; touch \"$FOLDER/array-$SLURM_ARRAY_TASK_ID.done\"' && "
      "until [ -e \"$FOLDER/array-0.done\" ] && [ -e \"$FOLDER/array-1.done\" ]; do sleep 0.1; "
      "done");
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  for (const std::string name : {"array-0", "array-1"}) {
    expect_result({.exit_code = 0, .out = file(name + ".out"), .err = file(name + ".err")}, 2,
                  "Slurm");
  }
}

TEST_F(SlurmTest, a_batch_script_without_srun_is_alone) {
  const Ended ended = run_in_cluster(
      "sbatch -n 3 -o \"$FOLDER/batch.out\" -e \"$FOLDER/batch.err\" --wrap "
      "'\"$EVALUATE\"; touch \"$FOLDER/batch.done\"' && "
      "until [ -e \"$FOLDER/batch.done\" ]; do sleep 0.1; done");
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  expect_result({.exit_code = 0, .out = file("batch.out"), .err = file("batch.err")}, 1, "none");
}

TEST_F(SlurmTest, launchers_inside_an_allocation_win) {
  expect_result(run_in_cluster("salloc -n 3 \"$LOCKSTEP\" run -n 3 \"$EVALUATE\""), 3,
                "lockstep run");
  expect_result(run_in_cluster("srun -n 1 \"$LOCKSTEP\" run -n 3 \"$EVALUATE\""), 3,
                "lockstep run");
  if (!program("mpirun.openmpi").empty()) {
    expect_result(run_in_cluster("salloc -n 3 " + kOpenMpiRun + "\"$EVALUATE\""), 3, "mpirun");
  }
  if (!program("mpirun.mpich").empty()) {
    expect_result(run_in_cluster("salloc -n 3 " + kMpichRun + "\"$EVALUATE\""), 3, "mpirun");
  }
}

TEST_F(SlurmTest, scripts_of_the_documentation) {
  const std::string path = std::filesystem::path(LOCKSTEP_COMMAND).parent_path();
  const std::vector<std::string> launchers = {"Slurm", "lockstep run"};
  for (const int n : {0, 1}) {
    const TemporaryFolder folder;
    write_job(folder, script_of("slurm.md", 2 * n));
    const Ended ended = run_in_cluster("cd '" + (folder / ".") + "' && PATH='" + path +
                                       "':$PATH && "
                                       "sbatch --nodes=1 --output=out --error=err job && "
                                       "until [ \"$(squeue -h)\" = '' ]; do sleep 0.1; done");
    EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
    expect_result(
        {.exit_code = 0, .out = contents_of(folder / "out"), .err = contents_of(folder / "err")}, 4,
        launchers[static_cast<std::size_t>(n)]);
  }
}

TEST_F(SlurmTest, torchrun_inside_a_step_wins) {
  SKIP_WITHOUT("torchrun");
  expect_result(run_in_cluster("srun -n 1 " + kTorchrun + "\"$EVALUATE\""), 3, "torchrun");
}

}  // namespace
}  // namespace lockstep::test
