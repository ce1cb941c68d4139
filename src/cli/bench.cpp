#include "cli/bench/bench.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>
#include <lockstep/world.hpp>
#include <map>

#include "base/cpu_model.hpp"
#include "base/cpus.hpp"
#include "base/plural.hpp"
#include "cli/parse.hpp"
#include "cli/subcommands.hpp"
#include "world/environment.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kBenchFooter = R"(Examples:
  lockstep bench                    all_reduce over 2 processes, 4 B to 16 MiB
  lockstep bench -n 4 --operation barrier --operation all_gather --threads

Results are checked before they are timed. A figure is the median over blocks of a block's
median. GB/s as defined by nccl-tests.
warm: the same buffer again. touch: every rank rewrites its buffer before each
call, only the call is timed. fresh: memory that no call has used yet.)";

/// Accepts the names of these values.
template <class Enum>
CLI::Validator one_of(std::initializer_list<Enum> values) {
  std::map<std::string, Enum> names;
  for (const Enum value : values) names.emplace(name_of(value), value);
  return choice(std::move(names));
}

/// Rejects what CLI::AsSizeValue takes for a number near 2^64.
CLI::Validator not_negative() {
  return CLI::Validator(
      [](const std::string& text) {
        return text.starts_with('-') ? fmt::format("got '{}', below 0", text) : "";
      },
      /*validator_desc=*/"");
}

constexpr const char* kAsRank = "--as-rank";

/// Starts this program as the ranks, which print.
int start_ranks(int n_ranks, const std::vector<std::string>& arguments) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::vector<std::string> words = {"--prefix", "never", "-n",    std::to_string(n_ranks),
                                    "--",       self,    "bench", kAsRank};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run(words);
}

/// The calling thread runs on its rank's core, until the destruction.
class CoreBinding {
 public:
  CoreBinding(const bench::Plan& plan, int rank) {
    ::sched_getaffinity(0, sizeof before_, &before_);
    if (plan.cores.empty()) return;
    bench::bind_to(plan.cores[static_cast<std::size_t>(rank) % plan.cores.size()]);
  }
  ~CoreBinding() { ::sched_setaffinity(0, sizeof before_, &before_); }
  CoreBinding(const CoreBinding&) = delete;
  CoreBinding& operator=(const CoreBinding&) = delete;

 private:
  cpu_set_t before_{};
};

}  // namespace

int bench(const std::vector<std::string>& arguments) {
  using bench::Mode;
  using bench::Operation;
  bench::Plan plan;
  std::uint64_t least = 4;
  std::uint64_t most = std::uint64_t{16} << 20;
  std::uint64_t factor = 4;
  int block_ms = 25;
  bool is_tuning = false;
  bool with_threads = false;
  bool without_processes = false;
  bool is_unpinned = false;
  bool is_rank = false;
  std::string json;

  CLI::App app("Measures collectives, or the thresholds of the shared engine.", "lockstep bench");
  app.footer(kBenchFooter);
  app.set_help_flag("-h,--help", "Print this help");
  app.add_option("-n", plan.n_ranks, "Ranks (default 2)")->check(CLI::Range(1, 512));
  app.add_option("--operation", plan.operations,
                 "barrier, all_reduce (default), broadcast, all_gather,\n"
                 "reduce_scatter, all_to_all")
      ->transform(
          one_of({Operation::barrier, Operation::all_reduce, Operation::broadcast,
                  Operation::all_gather, Operation::reduce_scatter, Operation::all_to_all}));
  app.add_option("--min", least, "Smallest buffer (default 4; takes 4KiB, 1MiB)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->transform(not_negative());
  app.add_option("--max", most, "Largest buffer (default 16MiB)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->transform(not_negative());
  app.add_option("--factor", factor, "Factor between sizes (default 4)")
      ->check(CLI::Range(2, 1024));
  app.add_option("--type", plan.type, "Elements: u8, i32, i64, f16, bf16, f32 (default) or f64")
      ->transform(one_of(
          {DType::u8, DType::i32, DType::i64, DType::f16, DType::bf16, DType::f32, DType::f64}));
  app.add_option("--mode", plan.mode, "Buffers: warm, touch or fresh (default warm)")
      ->transform(one_of({Mode::warm, Mode::touch, Mode::fresh}));
  app.add_flag("--shared", plan.in_shared_memory,
               "Use buffers of Group::allocate for ranks that are processes");
  app.add_flag("--threads", with_threads, "Also measure ranks as threads of one process");
  app.add_flag("--no-processes", without_processes, "Do not measure ranks as processes");
  app.add_flag("--unpinned", is_unpinned, "Do not bind ranks to cores");
  app.add_option("--blocks", plan.n_blocks, "Blocks of each size (default 5)")
      ->check(CLI::Range(1, 1000));
  app.add_option("--block-ms", block_ms, "Length of a block (default 25)")
      ->check(CLI::Range(1, 60'000));
  app.add_option("--json", json, "Write all figures to FILE");
  CLI::Option* const tune =
      app.add_flag("--tune", is_tuning,
                   "Only measure the shared engine's thresholds for -n ranks\n"
                   "(about a minute) and print the best LOCKSTEP_TUNE=...");
  for (const char* of_sizes : {"--operation", "--min", "--max", "--factor", "--type", "--mode",
                               "--shared", "--threads", "--no-processes", "--json"}) {
    tune->excludes(app.get_option(of_sizes));
  }
  app.add_flag(kAsRank, is_rank)->group("");  // internal

  if (const auto exit_code = parse(app, arguments)) return *exit_code;
  if (plan.operations.empty()) plan.operations = {Operation::all_reduce};
  if (least < size_of(plan.type) || most < least || most > (std::uint64_t{1} << 32)) {
    fmt::print(stderr,
               "lockstep bench: sizes from {} to {} bytes; expected from {}, the size of one {}, "
               "to 4 GiB, --min not above --max\n",
               least, most, size_of(plan.type), name_of(plan.type));
    return kUsageExitCode;
  }
  if (without_processes && !with_threads) {
    fmt::print(stderr, "lockstep bench: --no-processes leaves nothing to measure; add --threads\n");
    return kUsageExitCode;
  }
  if (is_tuning && plan.n_ranks < 2) {
    fmt::print(stderr, "lockstep bench: --tune measures at least two ranks, not -n {}\n",
               plan.n_ranks);
    return kUsageExitCode;
  }
  const bool has_processes = !without_processes;
  if (has_processes && !is_rank) return start_ranks(plan.n_ranks, arguments);
  for (std::uint64_t size = least; size <= most; size *= factor) plan.sizes.push_back(size);
  plan.block_time = std::chrono::milliseconds(block_ms);
  if (!is_unpinned) plan.cores = base::allowed_cores();

  std::vector<bench::Row> rows;
  std::ofstream file;  // opened before minutes of measuring, by the rank that prints
  const auto check_file = [&] {
    if (!file) throw SystemError({.operation = "lockstep bench"}, errno, "write " + json);
  };
  const auto open_file = [&] {
    if (!json.empty()) file.open(json);
    check_file();
  };
  if (has_processes) {
    const int rank = internal::read_world(Launcher::lockstep).rank;
    const CoreBinding binding(plan, rank);  // before it joins: the engine looks at the cores
    if (is_tuning) {
      const base::CpuModel cpu = base::cpu_model();
      if (rank == 0) {
        fmt::print(stderr, "lockstep bench: {} rank{} on {}, family {}, model {}, L2 {} KiB\n",
                   plan.n_ranks, base::plural(plan.n_ranks),
                   cpu.vendor_name().empty() ? "an unknown CPU" : cpu.vendor_name(), cpu.family,
                   cpu.model, cpu.l2_bytes >> 10U);
      }
      const std::string setting = bench::tuned(plan);
      if (rank == 0) fmt::print("{}\n", setting);
      return 0;
    }
    if (rank == 0) open_file();
    init_dist();
    rows = bench::measure(default_group(), plan, /*of_threads=*/false);
    destroy_dist();
    if (rank != 0) return 0;
  }
  if (!has_processes) open_file();
  if (with_threads) {
    run_ranks(plan.n_ranks, [&] {
      const CoreBinding binding(plan, get_rank());
      const auto of_threads = bench::measure(default_group(), plan, /*of_threads=*/true);
      if (get_rank() == 0) rows.insert(rows.end(), of_threads.begin(), of_threads.end());
    });
  }
  fmt::print("{}", bench::table_of(plan, rows));
  if (!json.empty()) {
    file << bench::json_of(plan, rows).dump(2) << '\n';
    file.flush();
    check_file();
  }
  return 0;
}

}  // namespace lockstep::cli
