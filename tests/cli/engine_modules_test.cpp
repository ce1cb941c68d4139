// The engines whose messages a module moves: mpi under the real mpirun of each MPI, ucx under
// `lockstep run`. The conformance suite, and failures.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "cli/intel_mpi.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

struct Library {
  std::string name;
  std::string module;

  bool is_mpi() const { return name != "ucx"; }
  const char* engine() const { return is_mpi() ? "mpi" : "ucx"; }
};

constexpr const char* kIntelMpi = "intelmpi";

/// Intel MPI, where it is: LaunchersTest says if it is not. MPICH's module serves it, because they
/// have one binary interface.
std::vector<Library> libraries_here() {
  std::vector<Library> libraries = {
      {"openmpi", OPENMPI_MODULE}, {"mpich", MPICH_MODULE}, {"ucx", UCX_MODULE}};
  if (!intel_mpiexec().empty()) libraries.push_back({kIntelMpi, MPICH_MODULE});
  return libraries;
}

std::vector<Library> libraries_of(bool is_mpi) {
  std::vector<Library> libraries = libraries_here();
  std::erase_if(libraries, [&](const Library& one) { return one.is_mpi() != is_mpi; });
  return libraries;
}

void PrintTo(const Library& library, std::ostream* out) { *out << library.name; }

class ModuleTest : public ::testing::TestWithParam<Library> {
 protected:
  void SetUp() override {
    if (GetParam().module.empty()) {
      GTEST_SKIP() << "built without " << GetParam().name << "; ./dev setup installs it";
    }
  }

  static bool is_mpi() { return GetParam().is_mpi(); }

  /// Runs a shell line's program on n ranks.
  static Ended run(int n_ranks, const std::string& line, const std::string& timeout_s = "60",
                   const std::string& record_dir = "") {
    const bool is_open = GetParam().name == "openmpi";
    const std::string flags =
        is_open ? "--allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1"
                : "";
    std::string mpirun = fmt::format("mpirun.{} {}", GetParam().name, flags);
    const TemporaryFolder libraries;
    if (GetParam().name == kIntelMpi) {
      // Under the name that the module was linked with.
      std::filesystem::create_symlink(INTELMPI_FOLDER "/lib/libmpi.so.12",
                                      libraries / "libmpich.so.12");
      mpirun = fmt::format("env LD_LIBRARY_PATH={} {}", libraries.path(), intel_mpiexec());
    }
    if (!is_mpi()) mpirun = LOCKSTEP_COMMAND " run";
    Command command(StartOptions{
        // The libraries' own leaks would fail a sanitized rank.
        .variables = {{"ASAN_OPTIONS", "detect_leaks=0"},
                      {is_mpi() ? "LOCKSTEP_MPI" : "LOCKSTEP_UCX", GetParam().module},
                      {"LOCKSTEP_TEST_BACKEND", GetParam().engine()},
                      {"LOCKSTEP_TIMEOUT", timeout_s}},
        .shell = fmt::format(
            "{}{} -n {}{} {}",
            record_dir.empty() ? "" : fmt::format("env LOCKSTEP_RECORD_DIR={} ", record_dir),
            mpirun, n_ranks, is_mpi() ? "" : " --", line),
        .watchdog = std::chrono::seconds(600)});  // 8 ranks on 2 busy cores take minutes
    return command.wait();
  }

  static void expect_conformance(int n_ranks) { expect_passes(n_ranks, "Conformance."); }

  /// How many of those tests of core_tests there are for ranks that a launcher started.
  static std::size_t n_tests_of(const std::string& tests, const std::string& but) {
    Command list(StartOptions{
        .variables = {{"LOCKSTEP_TEST_BACKEND", GetParam().engine()}},
        .shell = fmt::format("exec {} --gtest_list_tests --gtest_filter=*/{}*/launched{}",
                             CORE_TESTS_PROGRAM, tests, but)});
    const std::vector<std::string> lines = lines_of(list.wait().out);
    return static_cast<std::size_t>(std::count_if(
        lines.begin(), lines.end(), [](const auto& text) { return text.starts_with("  "); }));
  }

  /// All tests of core_tests whose names begin so pass on each rank. `variables`: as for env;
  /// `but`: the end of a filter.
  static void expect_passes(int n_ranks, const std::string& tests,
                            const std::string& variables = "", const std::string& but = "") {
    const std::size_t n_tests = n_tests_of(tests, but);
    ASSERT_GT(n_tests, 0U);
    // To a file each: in mpirun's own output the ranks' lines may break in the middle.
    const TemporaryFolder outputs;
    const Ended ended =
        run(n_ranks, fmt::format("env {} sh -c 'exec {} --gtest_brief=1 --gtest_color=no "
                                 "--gtest_filter=*/{}*/launched{} >{}/$$'",
                                 variables, CORE_TESTS_PROGRAM, tests, but, outputs.path()));
    EXPECT_EQ(ended.exit_code, 0) << ended.out;
    EXPECT_EQ(ended.err, "");
    int n_outputs = 0;
    for (const auto& output : std::filesystem::directory_iterator(outputs.path())) {
      ++n_outputs;
      const std::string text = contents_of(output.path());
      expect_contains(text, fmt::format("[  PASSED  ] {} tests.", n_tests));
    }
    EXPECT_EQ(n_outputs, n_ranks);
  }

  /// What the doctor says of the flight records of 3 ranks.
  static std::string records_of(const std::string& fault, const std::string& backend) {
    const TemporaryFolder records;
    const TemporaryFolder said;
    EXPECT_NE(run(3, fmt::format("{} {} {} {}", OVER_MODULE_PROGRAM, fault, said.path(), backend),
                  /*timeout_s=*/"60", records.path())
                  .exit_code,
              0);
    Command doctor(StartOptions{.arguments = {"doctor", "--record", records.path()}});
    const Ended ended = doctor.wait();
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    return ended.out;
  }

  /// Each of n ranks fails; returns what they say.
  static std::string failures_of(int n_ranks, const std::string& fault,
                                 const std::string& variables = "") {
    const TemporaryFolder said;
    const Ended ended = run(n_ranks, fmt::format("env {} {} {} {}", variables, OVER_MODULE_PROGRAM,
                                                 fault, said.path()));
    EXPECT_NE(ended.exit_code, 0);
    std::string text;
    for (int rank = 0; rank < n_ranks; ++rank) {
      const std::string words = contents_of(said / fmt::format("{}.said", rank));
      EXPECT_NE(words, "") << "of rank " << rank << ": " << ended.err;
      text += words;
    }
    return text;
  }

  /// For env: a module that sums wrongly, over this one.
  static std::string wrong_module() {
    return fmt::format("LOCKSTEP_MPI={} LOCKSTEP_TEST_MPI={}", WRONG_MPI_MODULE, GetParam().module);
  }

  static void expect_failure(const std::string& fault, const std::string& text,
                             const std::string& variables = "") {
    expect_contains(failures_of(3, fault, variables), text);
  }
};

/// What is about MPI alone, and about UCX.
class MpiModuleTest : public ModuleTest {};
class UcxModuleTest : public ModuleTest {};

std::string name_of(const ::testing::TestParamInfo<Library>& library) { return library.param.name; }
INSTANTIATE_TEST_SUITE_P(Libraries, ModuleTest, ::testing::ValuesIn(libraries_here()), name_of);
INSTANTIATE_TEST_SUITE_P(Libraries, MpiModuleTest, ::testing::ValuesIn(libraries_of(true)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Libraries, UcxModuleTest, ::testing::ValuesIn(libraries_of(false)),
                         name_of);

TEST_P(ModuleTest, conformance_of_1) { expect_conformance(1); }
TEST_P(ModuleTest, conformance_of_2) { expect_conformance(2); }
TEST_P(ModuleTest, conformance_of_3) { expect_conformance(3); }
TEST_P(ModuleTest, conformance_of_4) { expect_conformance(4); }
TEST_P(ModuleTest, conformance_of_8) { expect_conformance(8); }
// Three parts of at most 8, the last of one rank.
TEST_P(ModuleTest, conformance_of_17_that_reduce) {
  for (const char* tests : {"Conformance.all_reduce_of_every", "Conformance.reduce"}) {
    expect_passes(17, tests);
  }
}

// Told to be on several hosts: shared memory inside each, MPI between them.
TEST_P(ModuleTest, conformance_of_hosts_with_messages_between) {
  // 8 ranks take half a minute where cores are few: LOCKSTEP_TEST_LARGE=1 runs them too.
  std::vector<int> sizes = {3, 4};
  if (std::getenv("LOCKSTEP_TEST_LARGE") != nullptr) sizes.push_back(8);
  for (const int n_ranks : sizes) {
    expect_passes(n_ranks, "Conformance.", "LOCKSTEP_TEST_HOSTS=1");
  }
}

TEST_P(ModuleTest, conformance_of_other_levels_of_checking) {
  // Without headers a call may pair with another before its rank's refusal is known.
  expect_passes(3, "Conformance.", "LOCKSTEP_CHECK=off",
                "-*one_rank_refuses*:*a_rank_that_refuses*:*ranks_that_refuse_different*");
  // The ranks of this one call from two lines.
  expect_passes(3, "Conformance.", "LOCKSTEP_CHECK=full", "-*lists_of_parts_as_one_block*");
}

TEST_P(ModuleTest, mmengine_cases) {
  for (const char* variables : {"", "LOCKSTEP_TEST_HOSTS=1"}) {
    expect_passes(2, "MmengineCases.", variables);
  }
  expect_passes(1, "MmengineCases.");
}

TEST_P(ModuleTest, flight_records_name_the_rank_that_diverged) {
  for (const std::string backend : {GetParam().engine(), "hierarchical"}) {
    const std::string text = records_of("mismatch", backend);
    expect_contains(text, "records of ranks 0, 1, 2");
    expect_contains(text,
                    "Culprit: rank 2, which made another call as collective 2 of group 'world'");
  }
}

TEST_P(ModuleTest, a_killed_rank_leaves_its_flight_record) {
  for (const std::string backend : {GetParam().engine(), "hierarchical"}) {
    // `lockstep run` writes it for a rank whose record is in the memory that it has made.
    expect_contains(records_of("killed", backend),
                    fmt::format("rank 1: {}\n          last operation: barrier at over_module.cpp:",
                                is_mpi() ? "wrote no record itself: it was killed, or is still "
                                           "running"
                                         : "the rank was killed by signal 9 (SIGKILL)"));
  }
}

TEST_P(ModuleTest, ranks_that_end_leave_no_flight_record) {
  const TemporaryFolder records;
  const Ended ended = run(2, OVER_MODULE_PROGRAM " none", /*timeout_s=*/"60", records.path());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(std::filesystem::is_empty(records.path()));
}

TEST_P(ModuleTest, messages_past_2_to_the_31_elements) {
  if (std::getenv("LOCKSTEP_TEST_LARGE") == nullptr) {
    GTEST_SKIP() << "needs 13 GiB of memory: set LOCKSTEP_TEST_LARGE=1";
  }
  const Ended ended = run(2, OVER_MODULE_PROGRAM " long", /*timeout_s=*/"600");
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  for (const char* operation : {"broadcast", "recv", "all_gather", "all_reduce"}) {
    expect_contains(ended.out, operation);
  }
}

TEST_P(ModuleTest, ranks_that_make_different_calls_get_the_table) {
  expect_failure("mismatch", "  2     barrier");
}
TEST_P(ModuleTest, a_barrier_of_one_rank_is_known_by_its_line) {
  expect_failure("conditional",
                 "  0     barrier         -     -           -     -          over_module",
                 "LOCKSTEP_CHECK=full");
}
TEST_P(ModuleTest, levels_of_checking_that_differ_are_reported) {
  expect_failure("levels",
                 "LOCKSTEP_CHECK must be the same on all ranks, but it is light on rank 0, off on "
                 "rank 1, light on rank 2");
}
TEST_P(ModuleTest, an_exception_on_one_rank_reaches_the_others) {
  expect_failure("throw", "out of sheets");
}
TEST_P(ModuleTest, a_rank_that_cannot_write_its_trace_tells_the_others_why) {
  for (const std::string& line : lines_of(failures_of(3, "trace"))) {
    expect_contains(line, "/proc/rank-1");
    if (!line.starts_with("rank 1: ")) expect_contains(line, "rank 1 failed: ");
  }
}
TEST_P(ModuleTest, a_long_text_ends_with_a_mark_where_it_is_cut) {
  int n_told = 0;
  for (const std::string& line : lines_of(failures_of(3, "long_text"))) {
    if (line.starts_with("rank 1: ")) continue;
    ++n_told;
    expect_contains(line, "rank 1 failed: out of sheets: xxx");
    expect_contains(line, "xxx ... (truncated)");
  }
  EXPECT_EQ(n_told, 2);
}
TEST_P(ModuleTest, a_late_rank_is_named) { expect_failure("late", "waited 1 s for rank 1 of 3"); }
TEST_P(ModuleTest, ranks_that_wait_for_each_other_in_send_are_named) {
  const std::string text = failures_of(3, "cycle");
  const auto cycle_from = [](int rank) {
    return fmt::format(
        "rank {} waited 2 s for rank {} of 3, which waits for rank {}, which waits for rank {}\n",
        rank, (rank + 1) % 3, (rank + 2) % 3, rank);
  };
  EXPECT_TRUE(contains(text, cycle_from(0)) || contains(text, cycle_from(1)) ||
              contains(text, cycle_from(2)))
      << text;
}
TEST_P(ModuleTest, a_late_ranks_own_call_fails_too) {
  expect_failure("late", "rank 1: barrier on group 'world'");
}
TEST_P(ModuleTest, a_mismatch_that_is_caught_leaves_a_job_that_ends_well) {
  const Ended ended = run(3, OVER_MODULE_PROGRAM " caught");
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
}
TEST_P(MpiModuleTest, the_programs_own_MPI_Finalize_finds_no_message_left) {
  const Ended ended = run(3, OVER_MODULE_PROGRAM " finalize");
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
}
// Some of the ranks give up by themselves, and some because they hear of it.
TEST_P(MpiModuleTest, the_programs_own_MPI_Finalize_ends_after_a_timeout) {
  const TemporaryFolder said;
  const Ended ended = run(
      3, fmt::format("timeout 300 {} finalize_after_timeout {}", OVER_MODULE_PROGRAM, said.path()));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}
TEST_P(ModuleTest, a_rank_that_waits_is_notified_of_a_failure_before_its_own_limit) {
  const std::string text = failures_of(3, "limits");
  expect_contains(text, "rank 1 waited 1 s for rank 0 of 3");
  EXPECT_EQ(text.find("rank 2 waited"), std::string::npos) << text;
}
TEST_P(UcxModuleTest, ranks_join_after_a_limit_has_passed) {
  const TemporaryFolder said;
  const Ended ended = run(2, fmt::format("{} retry {}", OVER_MODULE_PROGRAM, said.path()));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  expect_contains(contents_of(said / "0.said"), "rank 1 of 2 did not call init_dist within 1 s");
}
TEST_P(ModuleTest, what_a_rank_sent_before_it_left_arrives) {
  const TemporaryFolder said;
  const Ended ended = run(2, fmt::format("env LOCKSTEP_CHECK=off {} last_messages {}",
                                         OVER_MODULE_PROGRAM, said.path()));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}
TEST_P(UcxModuleTest, a_second_program_is_not_the_rank) {
  const Ended ended = run(2, fmt::format("sh -c '{0} none && exec {0} none'", OVER_MODULE_PROGRAM));
  EXPECT_NE(ended.exit_code, 0);
  expect_contains(ended.err, " is taken by process ");
}
TEST_P(UcxModuleTest, a_limit_on_descriptors_is_named) {
  const Ended ended =
      run(2, fmt::format("sh -c 'ulimit -n 100; exec {} none'", OVER_MODULE_PROGRAM));
  EXPECT_NE(ended.exit_code, 0);
  expect_contains(ended.err, "raise the limit on open files (ulimit -n)");
}
TEST_P(ModuleTest, there_are_more_groups_than_mpi_has_communicators) {
  const Ended ended = run(2, OVER_MODULE_PROGRAM " groups");
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}
TEST_P(ModuleTest, an_exchange_that_ended_leaves_its_memory_alone) {
  const Ended ended = run(2, fmt::format("timeout 60 {} cancelled", OVER_MODULE_PROGRAM));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}
TEST_P(ModuleTest, an_exchange_that_ended_in_the_middle_of_a_message_leaves_its_memory_alone) {
  if (GetParam().name == kIntelMpi) GTEST_SKIP() << "no message of it is known to stop there";
  const TemporaryFolder said;
  // Otherwise the receiver reads the sender's memory itself.
  const Ended ended =
      run(2, fmt::format("env OMPI_MCA_btl_vader_single_copy_mechanism=none {} "
                         "timeout 60 {} stopped {}",
                         is_mpi() ? "UCX_TLS=posix,self" : "", OVER_MODULE_PROGRAM, said.path()));
  EXPECT_TRUE(std::filesystem::exists(said / "4.said")) << ended.err;
}
TEST_P(MpiModuleTest, only_one_thread_calls_an_mpi_that_grants_no_more) {
  for (const char* level : {"single", "funneled", "serialized"}) {
    const Ended ended = run(3, fmt::format("timeout 60 {} {}", OVER_MODULE_PROGRAM, level));
    EXPECT_EQ(ended.exit_code, 0) << level << ": " << ended.err;
  }
}
TEST_P(ModuleTest, a_failing_departure_ends_the_ranks_own_pending_calls) {
  for (const std::string& line : lines_of(failures_of(3, "pending"))) {
    expect_contains(line, "rank 1 failed: out of disk");
  }
}
TEST_P(ModuleTest, a_rank_that_leaves_is_named) {
  expect_failure("leave", "rank 1 left the world");
}

TEST_P(ModuleTest, operations_of_the_doctor) {
  const Ended ended =
      run(2, LOCKSTEP_COMMAND " doctor --operations " + std::string(GetParam().engine()));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  expect_contains(ended.out, fmt::format("over 2 rank(s) and {} match a single-core reference",
                                         GetParam().engine()));
}
TEST_P(MpiModuleTest, the_doctor_names_an_engine_that_computes_wrongly) {
  const Ended ended =
      run(2, fmt::format("env {} {} doctor --operations mpi", wrong_module(), LOCKSTEP_COMMAND));
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_EQ(ended.out.find("match a single-core reference"), std::string::npos) << ended.out;
  expect_contains(ended.err, "all_reduce of i32, sum on rank ");
  expect_contains(ended.err, " of 2 over mpi is wrong");
}

TEST_P(ModuleTest, a_wrong_module_is_reported) {
  const std::string variable = is_mpi() ? "LOCKSTEP_MPI" : "LOCKSTEP_UCX";
  expect_contains(failures_of(1, "none", variable + "=abacus"), variable + " is 'abacus'");
}

TEST_P(UcxModuleTest, a_device_that_is_not_there_is_named) {
  expect_contains(failures_of(2, "none", "UCX_NET_DEVICES=abacus"),
                  " for UCX_NET_DEVICES=abacus and UCX_TLS=");
}

TEST_P(MpiModuleTest, the_other_mpi_is_rejected) {
  const bool is_open = GetParam().name == "openmpi";
  const std::string other = is_open ? MPICH_MODULE : OPENMPI_MODULE;
  if (other.empty()) GTEST_SKIP() << "only one MPI is here";
  // Open MPI's ranks, each a world of its own, make this folder at once, and one of them may fail.
  std::array<char, 256> host{};
  ASSERT_EQ(::gethostname(host.data(), host.size() - 1), 0);
  const char* const sessions = std::getenv("OMPI_MCA_orte_tmpdir_base");
  std::filesystem::create_directories(
      (sessions != nullptr ? sessions : std::filesystem::temp_directory_path()) /
      fmt::format("ompi.{}.{}", host.data(), ::getuid()));
  expect_contains(failures_of(2, "none", "LOCKSTEP_MPI=" + other), "MPI says rank");
}

}  // namespace
}  // namespace lockstep::test
