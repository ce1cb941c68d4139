#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "cli/doctor/checks.hpp"
#include "engines/catalog.hpp"
#include "world/environment.hpp"
#include "world/variables.hpp"

namespace lockstep::cli {
namespace {

bool is_launcher_variable(std::string_view name) {
  static constexpr std::array<std::string_view, 10> kNames = {
      "RANK",        "WORLD_SIZE",  "LOCAL_RANK",      "LOCAL_WORLD_SIZE", "GROUP_RANK",
      "MASTER_ADDR", "MASTER_PORT", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",  "JOB_COMPLETION_INDEX"};
  static constexpr std::array<std::string_view, 7> kPrefixes = {
      "LOCKSTEP_", "TORCHELASTIC_R", "SLURM_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_RANK", "PMIX_NAM"};
  return std::any_of(kNames.begin(), kNames.end(), [&](auto other) { return name == other; }) ||
         std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](auto prefix) { return name.starts_with(prefix); });
}

/// How many letters to insert, remove or replace.
std::size_t distance(std::string_view from, std::string_view to) {
  std::vector<std::size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (const char letter : from) {
    std::size_t diagonal = row[0]++;
    for (std::size_t i = 0; i < to.size(); ++i) {
      const std::size_t replaced = diagonal + (letter == to[i] ? 0 : 1);
      diagonal = row[i + 1];
      row[i + 1] = std::min({replaced, diagonal + 1, row[i] + 1});
    }
  }
  return row.back();
}

/// The variable that a misspelt one was meant to be; empty: it is none.
std::string_view meant_by(std::string_view name) {
  static constexpr std::array<std::string_view, 8> kNames = {
      "LOCKSTEP_CHECK", "LOCKSTEP_TIMEOUT", "LOCKSTEP_RECORD_DIR", "LOCKSTEP_TRACE",
      "LOCKSTEP_MPI",   "LOCKSTEP_UCX",     "LOCKSTEP_TUNE",       "LOCKSTEP_SIMD"};
  for (const std::string_view known : kNames) {
    const std::size_t n = distance(name, known);
    if (n > 0 && n <= 2) return known;  // two letters that are exchanged are two
  }
  return {};
}

Finding variables() {
  std::vector<std::string> seen;
  std::string advice;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    if (is_launcher_variable(name)) seen.emplace_back(text);
    const auto advise = [&advice](const std::string& sentence) {
      advice += (advice.empty() ? "" : " ") + sentence;
    };
    if (name == "LOCKSTEP_NETWORK") {
      advise("LOCKSTEP_NETWORK has no effect: the engines between hosts no longer choose by it.");
    }
    if (const std::string_view meant = meant_by(name); !meant.empty()) {
      advise(fmt::format("lockstep does not read {}: did you mean {}?", name, meant));
    }
  }
  std::sort(seen.begin(), seen.end());
  std::string text;
  for (const std::string& variable : seen) text += (text.empty() ? "" : " ") + variable;
  if (text.empty()) text = "none set by a launcher";
  return {"variables", advice.empty() ? State::good : State::note, text, advice};
}

std::string text_of(const internal::World& world) {
  return fmt::format("{}: rank {} of {}, local rank {} of {}", name_of(world.launcher), world.rank,
                     world.size, world.local_rank, world.local_size);
}

}  // namespace

Findings check_job(int n_ranks) {
  Findings findings = {variables()};
  internal::World world;
  try {
    Env::read();
    world = internal::read_world(infer_launcher());
  } catch (const Error& error) {
    findings.push_back({"launcher", State::missing, error.text(),
                        "init_dist rejects this environment with the same text"});
    return findings;
  }
  const bool is_alone = world.launcher == Launcher::none;
  if (is_alone) {
    findings.push_back(
        {"launcher", State::good, "none: a program started here runs as rank 0 of 1"});
    world = {.launcher = Launcher::lockstep,
             .rank = 0,
             .size = n_ranks,
             .local_rank = 0,
             .local_size = n_ranks,
             .segment = "",
             .job = {}};
  } else {
    findings.push_back({"launcher", State::good, text_of(world)});
  }
  const std::string which =
      is_alone ? fmt::format("`lockstep run -n {}`", n_ranks) : std::string("this job");
  bool can_run = false;
  for (const engines::Entry& entry : engines::catalog()) {
    const auto [is_available, reason] = entry.available(world);
    can_run = can_run || is_available;
    findings.push_back({fmt::format("engine {}", entry.name),
                        is_available ? State::good : State::note,
                        is_available ? "can serve " + which : reason});
  }
  findings.push_back({"engine gloo, nccl", State::note,
                      "only in programs that link lockstep::nn (libtorch); this command does not"});
  if (!can_run) {
    // What gloo needs of the environment.
    const bool may_use_gloo = world.size > world.local_size && internal::variable("MASTER_ADDR") &&
                              internal::variable("MASTER_PORT");
    findings.push_back({"engines", may_use_gloo ? State::note : State::missing,
                        "none of this command's can serve " + which,
                        may_use_gloo ? "a program that links lockstep::nn may, over gloo; for "
                                       "others the lines above say what each engine lacks"
                                     : "the lines above say what each lacks"});
  }
  return findings;
}

}  // namespace lockstep::cli
