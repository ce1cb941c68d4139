#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <lockstep/error.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/doctor/checks.hpp"
#include "cli/doctor/record_check.hpp"
#include "cli/parse.hpp"
#include "cli/subcommands.hpp"
#include "run/options.hpp"
#include "world/environment.hpp"

namespace lockstep::cli {
namespace {

std::string_view name_of(State state) {
  switch (state) {
    case State::good: return "ok";
    case State::note: return "note";
    case State::missing: return "MISSING";
  }
  return "unknown";
}

void print_text(const Findings& findings, bool can_run) {
  fmt::print("{:<8} {:<16} {}\n", name_of(State::good), "version", LOCKSTEP_VERSION);
  for (const Finding& finding : findings) {
    fmt::print("{:<8} {:<16} {}\n", name_of(finding.state), finding.name, finding.text);
    if (!finding.advice.empty()) fmt::print("{:<25} -> {}\n", "", finding.advice);
  }
  fmt::print("{}\n", can_run ? "lockstep can run here." : "lockstep cannot run here.");
}

void print_json(const Findings& findings, bool can_run) {
  auto list = nlohmann::json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"name", finding.name},
                    {"state", name_of(finding.state)},
                    {"text", finding.text},
                    {"advice", finding.advice}});
  }
  const nlohmann::json report = {
      {"version", LOCKSTEP_VERSION}, {"can_run", can_run}, {"findings", list}};
  // Variables may contain arbitrary bytes.
  fmt::print("{}\n", report.dump(/*indent=*/2, ' ', /*ensure_ascii=*/false,
                                 nlohmann::json::error_handler_t::replace));
}

/// Ranks on this host according to the launcher; 2 without one or if its variables contradict.
int ranks_here() {
  try {
    const internal::World world = internal::read_world(infer_launcher());
    return world.launcher == Launcher::none ? 2 : world.local_size;
  } catch (const Error&) {
    return 2;  // check_job reports it
  }
}

}  // namespace

int doctor(const std::vector<std::string>& arguments) {
  bool as_json = false;
  int n_ranks = 0;
  std::string record_dir;
  std::string engine;
  CLI::App app(
      "Checks this machine, build and environment for lockstep, and says what to do about\n"
      "what is missing. Run it where the ranks run: in the container, in the job script,\n"
      "under mpirun or srun. With --record: which rank made a job fail, and at which call.\n\n"
      "Exit code: 0 if ranks can run here, 1 if something essential is missing.",
      "lockstep doctor");
  app.set_help_flag("-h,--help", "Print this help");
  app.add_flag("--json", as_json, "Print one JSON object instead of text");
  app.add_option("-n", n_ranks, "Number of ranks to start here (default: the launcher's, or 2)")
      ->check(CLI::Range(1, run::kMaxRanks))
      ->type_name("N");
  app.add_option("--record", record_dir,
                 "Read the flight records of a job with LOCKSTEP_RECORD_DIR=DIR instead, and say\n"
                 "which rank diverged from the others, and where")
      ->check(not_empty())
      ->excludes("--json", "-n")
      ->type_name("DIR");
  app.add_option("--operations", engine,
                 "Only run every operation once on a few elements over ENGINE (auto, shared, mpi,\n"
                 "hierarchical, ...) and compare with one core; for all ranks of a launcher:\n"
                 "mpirun -n 2 lockstep doctor --operations mpi")
      ->check(not_empty())
      ->excludes("--json", "-n", "--record")
      ->type_name("ENGINE");
  if (const auto exit_code = parse(app, arguments)) return *exit_code;
  if (!engine.empty()) return doctor_operations(engine);
  if (!record_dir.empty()) return doctor_record(record_dir);
  if (n_ranks == 0) n_ranks = ranks_here();
  Findings findings = check_machine(n_ranks);
  for (const Findings& more : {check_libraries(), check_operations(), check_job(n_ranks)}) {
    findings.insert(findings.end(), more.begin(), more.end());
  }
  const bool can_run = std::none_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.state == State::missing;
  });
  if (as_json) {
    print_json(findings, can_run);
  } else {
    print_text(findings, can_run);
  }
  return can_run ? 0 : 1;
}

}  // namespace lockstep::cli
