#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "cli/command.hpp"
#include "support/expect.hpp"

namespace lockstep::test {
namespace {

struct Report {
  int exit_code;
  nlohmann::json all;
  std::map<std::string, nlohmann::json> findings;  ///< by name
};

// The MPI libraries, which the doctor loads and unloads, leak what their constructors made.
const std::map<std::string, std::string> kNoLeakCheck = {{"ASAN_OPTIONS", "detect_leaks=0"}};

/// `before`: a shell line for the doctor's process, as "ulimit -n 40;".
Report examine(const std::string& before = {}, std::map<std::string, std::string> variables = {},
               const std::string& options = {}) {
  variables.insert(kNoLeakCheck.begin(), kNoLeakCheck.end());
  Command command(
      StartOptions{.variables = std::move(variables),
                   .shell = before + " exec '" LOCKSTEP_COMMAND "' doctor --json " + options});
  const Ended ended = command.wait();
  Report report{ended.exit_code, nlohmann::json::parse(ended.out, nullptr, false), {}};
  EXPECT_FALSE(report.all.is_discarded()) << ended.out << ended.err;
  if (report.all.is_discarded()) return report;
  for (const auto& finding : report.all.at("findings")) {
    const auto [at, is_new] = report.findings.emplace(finding.at("name"), finding);
    EXPECT_TRUE(is_new) << finding;
    const std::string text = finding.at("text");
    EXPECT_FALSE(text.empty()) << finding;
    EXPECT_EQ(text.find_first_of(std::string_view("\0\n\t", 3)), std::string::npos) << finding;
  }
  return report;
}

void expect_says(const Report& report, const std::string& name, const std::string& state,
                 const std::string& text, const std::string& advice = {}) {
  const auto found = report.findings.find(name);
  ASSERT_NE(found, report.findings.end()) << name << " is not in " << report.all;
  const nlohmann::json& finding = found->second;
  EXPECT_EQ(finding.at("state"), state) << finding;
  EXPECT_NE(finding.at("text").get<std::string>().find(text), std::string::npos) << finding;
  EXPECT_NE(finding.at("advice").get<std::string>().find(advice), std::string::npos) << finding;
  EXPECT_EQ(finding.at("advice").get<std::string>().empty(), advice.empty()) << finding;
}

TEST(DoctorTest, a_machine_that_can_run) {
  const Report report = examine("ulimit -n 1024;");
  EXPECT_EQ(report.exit_code, 0) << report.all;
  EXPECT_EQ(report.all.at("can_run"), true);
  expect_says(report, "kernel", "ok", "Linux");
  expect_says(report, "shared memory", "ok", "memfd works");
  expect_says(report, "sockets", "ok", "loopback");
  expect_says(report, "open files", "ok", "1024");
  expect_says(report, "variables", "ok", "LOCKSTEP_TEST_MARK=");
  expect_says(report, "launcher", "ok", "none");
  expect_says(report, "engine shared", "ok", "`lockstep run -n 2`");
  expect_says(report, "engine solo", "note", "one rank");
  expect_says(report, "results solo", "ok", "over 1 rank(s) match a single-core reference");
  expect_says(report, "results shared", "ok", "over 3 rank(s) match a single-core reference");
  for (const char* name : {"simd", "memory", "locked memory", "address space", "/dev/shm",
                           "libtorch", "mpi Open MPI", "mpi MPICH", "mpi Intel MPI"}) {
    EXPECT_TRUE(report.findings.contains(name)) << name;
  }
}

TEST(DoctorTest, operations_of_the_ranks_of_a_launcher) {
  const Ended ended = run({"-n", "2", LOCKSTEP_COMMAND, "doctor", "--operations", "shared"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out, "over 2 rank(s) and shared match a single-core reference"))
      << ended.out;
  EXPECT_EQ(lines_of(ended.out).size(), 1U) << ended.out;
  const Ended none = run({"-n", "2", LOCKSTEP_COMMAND, "doctor", "--operations", "abacus"});
  EXPECT_NE(none.exit_code, 0);
  EXPECT_TRUE(contains(none.err, "backend 'abacus' does not exist")) << none.err;
}

TEST(DoctorTest, empty_names_are_refused) {
  for (const char* option : {"--operations", "--record"}) {
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"doctor", option, ""},
          std::vector<std::string>{"doctor", std::string(option) + "="}}) {
      const Ended ended = Command(StartOptions{.arguments = words}).wait();
      EXPECT_EQ(ended.exit_code, 2) << words[1];
      EXPECT_EQ(ended.out, "");
      EXPECT_TRUE(contains(ended.err, option)) << ended.err;
    }
  }
}

TEST(DoctorTest, lines_for_people) {
  Command command(StartOptions{.arguments = {"doctor"}, .variables = kNoLeakCheck});
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.out;
  EXPECT_TRUE(ended.out.starts_with("ok       version          ")) << ended.out;
  expect_contains(ended.out, "ok       shared memory    memfd works\n");
  EXPECT_TRUE(ended.out.ends_with("lockstep can run here.\n")) << ended.out;
}

TEST(DoctorTest, fewer_cores_than_ranks) {
  const Report report =
      examine("taskset -pc $(taskset -pc $$ | sed 's/.*[ ,-]//') $$ >&2;", {}, "-n 4");
  EXPECT_EQ(report.exit_code, 0);  // slow, but it runs
  expect_says(report, "cores", "note", "1 of the machine's", "4 ranks share 1 core(s)");
}

// AddressSanitizer maps terabytes.
#ifdef __SANITIZE_ADDRESS__
#define SKIP_WITH_SANITIZER() GTEST_SKIP() << "a sanitized command does not start with ulimit -v"
#else
#define SKIP_WITH_SANITIZER() static_assert(true)
#endif

TEST(DoctorTest, low_limits) {
  SKIP_WITH_SANITIZER();
  const Report report = examine("ulimit -n 40; ulimit -l 64; ulimit -v 4000000;");
  EXPECT_EQ(report.exit_code, 0);
  expect_says(report, "open files", "note", "40", "ulimit -n 1024");
  expect_says(report, "locked memory", "note", "0 MiB", "ulimit -l unlimited");
  expect_says(report, "address space", "note", "3906 MiB", "ulimit -v unlimited");
}

TEST(DoctorTest, no_room_for_shared_memory) {
  SKIP_WITH_SANITIZER();
  const Report report = examine("ulimit -v 60000;");
  EXPECT_EQ(report.exit_code, 1);
  EXPECT_EQ(report.all.at("can_run"), false);
  expect_says(report, "shared memory", "MISSING", "mmap: Cannot allocate memory", "ulimit -v");
}

TEST(DoctorTest, a_misspelt_variable) {
  const Report report = examine("", {{"LOCKSTEP_TIMEOT", "3"},
                                     {"LOCKSTEP_MPIX", "x"},
                                     {"LOCKSTEP_SMID", "x"},
                                     {"LOCKSTEP_HOME", "x"}});
  EXPECT_EQ(report.exit_code, 0);
  expect_says(report, "variables", "note", "LOCKSTEP_TIMEOT=3",
              "lockstep does not read LOCKSTEP_MPIX: did you mean LOCKSTEP_MPI?");
  expect_says(report, "variables", "note", "LOCKSTEP_TIMEOT=3",
              "lockstep does not read LOCKSTEP_TIMEOT: did you mean LOCKSTEP_TIMEOUT?");
  expect_says(report, "variables", "note", "LOCKSTEP_SMID=x", "did you mean LOCKSTEP_SIMD?");
  EXPECT_FALSE(contains(report.findings.at("variables").at("advice"), "HOME"));
}

TEST(DoctorTest, the_network_has_no_effect) {
  const Report report = examine("", {{"LOCKSTEP_NETWORK", "25us,100Gbit"}});
  EXPECT_EQ(report.exit_code, 0);
  expect_says(report, "variables", "note", "LOCKSTEP_NETWORK=25us,100Gbit",
              "LOCKSTEP_NETWORK has no effect");
}

TEST(DoctorTest, what_the_launcher_reported) {
  const std::map<std::string, std::string> mpich = {
      {"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}};
  const Report report = examine("", mpich);
  EXPECT_EQ(report.exit_code, 0);
  expect_says(report, "variables", "ok",
              "MPI_LOCALNRANKS=3 MPI_LOCALRANKID=1 PMI_RANK=1 PMI_SIZE=3");
  expect_says(report, "launcher", "ok", "mpirun: rank 1 of 3, local rank 1 of 3");
  EXPECT_NE(report.findings.at("cores").at("text").get<std::string>().find("for 3 rank(s)"),
            std::string::npos);
}

TEST(DoctorTest, a_contradictory_environment_cannot_run) {
  const Report report = examine("", {{"RANK", "x\xff"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(report.exit_code, 1);
  expect_says(report, "launcher", "MISSING", "RANK is 'x\xEF\xBF\xBD', not a whole number",
              "init_dist rejects");
}

TEST(DoctorTest, a_held_down_instruction_set) {
  const Report report = examine("", {{"LOCKSTEP_SIMD", "scalar"}});
  EXPECT_EQ(report.findings.at("simd").at("text").get<std::string>().rfind("scalar", 0), 0U);
}

TEST(DoctorTest, wrong_arguments) {
  Command command(StartOptions{.arguments = {"doctor", "-n", "0"}});
  EXPECT_EQ(command.wait().exit_code, 2);
}

}  // namespace
}  // namespace lockstep::test
