#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/cpus.hpp"
#include "base/number.hpp"
#include "cli/files.hpp"
#include "cli/parse.hpp"
#include "cli/subcommands.hpp"
#include "cli/trace/run_traced.hpp"
#include "run/errors.hpp"
#include "run/launch_ranks.hpp"
#include "run/options.hpp"
#include "run/rank_environment.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kRunFooter = R"(Example:
  lockstep run -n 4 -- ./train --epochs 3

Everything after PROGRAM is passed to it; '--' may be left out unless its name
begins with a dash.

Each rank finds in its environment RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, GROUP_RANK (the node's number), MASTER_ADDR, MASTER_PORT (a
free port, or yours if it is set), the other variables of torchrun (GROUP_WORLD_SIZE,
ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME, TORCHELASTIC_RUN_ID,
TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS),
LOCKSTEP_RESTART (the number of restarts so far) and
LOCKSTEP_SEGMENT, by which lockstep::init_dist joins the others.
OMP_NUM_THREADS is set to the cores per rank, at least 1, unless you have set it.
Rank 0 (--stdin) reads your standard input; the others, and replacements of
--elastic, read nothing. At a terminal Ctrl-Z stops the ranks too, and the time
until fg counts against no limit.

When a rank fails, the others have a second to exit with their own error, then
get SIGTERM and, after --grace seconds, SIGKILL. Ctrl-C goes to all ranks; a
second one kills them. SIGUSR1 and SIGUSR2 (sbatch --signal) are forwarded to
all ranks and do not end the job. A signal goes to the rank's process that called
init_dist; its child processes are signalled after it has exited. If none has
called init_dist, all processes of the rank get the signal.

On several machines, the same line on each, with its own number:
  lockstep run --nnodes 2 --node-rank R --rdzv HOST:PORT -n 4 -- ./train
HOST is an address or a name of node 0's machine and becomes MASTER_ADDR. At an
address node 0 listens there only, at a name on every address of its machine. When a rank fails
on one node, the ranks of all nodes end, and every `lockstep run` exits with its code.

Exit code: 0 if every rank exited with 0; otherwise that of the rank that failed
first, or 128 + N if signal N killed it. 2: invalid command line. 127: program
not found. 126: program not executable. 1: system error.)";

class Formatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* /*app*/, std::string /*name*/) const override {
    return "\nUsage: lockstep run -n N [OPTIONS] -- PROGRAM [ARGUMENTS...]\n";
  }
};

/// Accepts `auto` for `value`.
CLI::Validator automatic(int value) {
  return CLI::Validator(
      [value](std::string& text) -> std::string {
        if (text == "auto") text = std::to_string(std::min(value, run::kMaxRanks));
        return {};
      },
      /*validator_desc=*/"");
}

/// -n4, -n-4 (whose range is checked later) or -nauto.
bool is_number_of_ranks(const std::string& word) {
  return word == "-nauto" || (word.starts_with("-n") && word.size() > 2 &&
                              word.find_first_not_of("-0123456789", 2) == std::string::npos);
}

struct OwnWords {
  std::size_t n = 0;         ///< so many come before the program
  std::string unknown = {};  ///< the first that is not an option; empty: all are
};

/// The launcher's own words. The program's arguments never reach the parser, so none of them is
/// mistaken for ours. An unknown option is found here: CLI11 would first say what is missing, and
/// takes -np for -n with the value p.
OwnWords own_words(const CLI::App& app, const std::vector<std::string>& arguments) {
  OwnWords own;
  while (own.n < arguments.size()) {
    const std::string& word = arguments[own.n];
    if (word == "--" || !word.starts_with('-') || word == "-") break;
    const std::string name = word.substr(0, word.find('='));
    const CLI::Option* const option = app.get_option_no_throw(name);
    if (option == nullptr && own.unknown.empty() && !is_number_of_ranks(name)) own.unknown = name;
    const bool has_value =
        option != nullptr && name == word && option->get_items_expected_max() > 0;
    own.n += has_value ? 2 : 1;
  }
  own.n = std::min(own.n, arguments.size());
  return own;
}

/// Reads HOST:PORT. Returns what is wrong with the multi-node options; empty: nothing.
std::string check_nodes(const CLI::App& app, run::NodesOptions& nodes,
                        const std::string& rendezvous) {
  if (app.count("--nnodes") == 0) {
    for (const char* option : {"--node-rank", "--rdzv", "--rdzv-secret", "--rdzv-timeout"}) {
      if (app.count(option) == 0) continue;
      return fmt::format(
          "{} needs --nnodes, the number of machines: without it this machine is the whole world",
          option);
    }
  }
  if (nodes.n_nodes == 1 && nodes.node_rank == 0) return {};
  if (app.count("--node-rank") == 0) {
    return fmt::format("--nnodes {} needs --node-rank, from 0 to {}", nodes.n_nodes,
                       nodes.n_nodes - 1);
  }
  if (nodes.node_rank >= nodes.n_nodes) {
    return fmt::format("--node-rank is {}, but --nnodes is {}: nodes are 0 to {}", nodes.node_rank,
                       nodes.n_nodes, nodes.n_nodes - 1);
  }
  const std::size_t colon = rendezvous.rfind(':');
  if (colon != std::string::npos && colon > 0) {
    nodes.host = rendezvous.substr(0, colon);
    if (nodes.host.starts_with('[') && nodes.host.ends_with(']')) {  // an IPv6 address
      nodes.host = nodes.host.substr(1, nodes.host.size() - 2);
    }
    nodes.port = base::parse_number<std::uint16_t>(rendezvous.substr(colon + 1)).value_or(0);
    if (nodes.port != 0 && !nodes.host.empty()) return {};
  }
  return fmt::format("--rdzv is '{}', expected HOST:PORT of node 0, as 10.0.0.1:29400", rendezvous);
}

/// Reads MIN or MIN:MAX. Returns what is wrong with it.
std::string read_elastic(const std::string& text, run::Options& options) {
  run::ElasticOptions& elastic = options.elastic;
  const std::size_t colon = text.find(':');
  const int n_nodes = options.nodes.n_nodes;
  // Nodes may have different numbers of ranks; node 0 checks again.
  const int n_ranks = n_nodes == 1 ? options.n_ranks : run::kMaxRanks * n_nodes;
  const bool has_most = colon != std::string::npos;
  elastic.least = base::parse_number<int>(text.substr(0, colon)).value_or(0);
  elastic.most = has_most ? base::parse_number<int>(text.substr(colon + 1)).value_or(0) : n_ranks;
  if (elastic.least < 1 || elastic.least > elastic.most || elastic.most > n_ranks) {
    return fmt::format("--elastic is '{}', expected MIN or MIN:MAX with 1 <= MIN <= MAX{}", text,
                       n_nodes == 1 ? fmt::format(" <= {}, the ranks of -n", n_ranks)
                                    : ", ranks of all nodes together");
  }
  if (n_nodes > 1 && options.max_restarts > 0) {
    return "--max-restarts starts all ranks of all nodes again, which --elastic with --nnodes does "
           "not; leave it";
  }
  if (!has_most && n_nodes > 1) elastic.most = 0;  // all, which only node 0 knows
  return {};
}

/// Reads a rank or none. Returns what is wrong with it.
std::string read_stdin_rank(const std::string& text, run::Options& options) {
  options.stdin_rank = base::parse_number<int>(text);
  if (text == "none" || options.stdin_rank.value_or(-1) >= 0) return {};
  return fmt::format("--stdin is '{}', expected a rank, from 0, or none", text);
}

/// Reads the file without its newline. Returns what is wrong with it.
std::string read_secret(const std::string& path, std::string& secret) {
  constexpr std::size_t kMin = 16;
  std::string text = read_regular("lockstep run: --rdzv-secret", path);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (text.size() < kMin || text.size() > run::kMaxSecretBytes) {
    return fmt::format(
        "--rdzv-secret: {} holds {} bytes, expected {} to {}, as head -c 24 /dev/urandom | base64 "
        "writes",
        path, text.size() > run::kMaxSecretBytes ? "more" : std::to_string(text.size()), kMin,
        run::kMaxSecretBytes);
  }
  secret = text;
  return {};
}

}  // namespace

int run(const std::vector<std::string>& arguments) {
  run::Options options;
  double grace_s = 10;
  double start_limit_s = 300;
  std::string log_dir;

  CLI::App app("Starts a program as N ranks on this machine and supervises them.", "lockstep run");
  app.formatter(std::make_shared<Formatter>());
  app.get_formatter()->column_width(30);
  app.footer(kRunFooter);
  app.set_help_flag("-h,--help", "Print this help");
  app.add_option("-n", options.n_ranks,
                 "Number of ranks to start, 1 to 512, or auto: one for\n"
                 "each core that this command may use")
      ->required()
      ->transform(automatic(base::n_usable_cores()))
      ->check(number(1, run::kMaxRanks, "auto or a whole number"))
      ->type_name("N");
  app.add_option("--log-dir", log_dir,
                 "Also write each rank's output to DIR/rank-R.out and\n"
                 "rank-R.err (rank-R.restart-K.out, ... after restart K);\n"
                 "they must not exist yet")
      ->check(not_empty())
      ->type_name("DIR");
  app.add_option("--max-restarts", options.max_restarts,
                 "Restart all ranks after a failure, at most K times\n"
                 "(default 0)")
      ->check(number(0, 1'000'000, "a whole number"))
      ->type_name("K");
  std::string elastic;
  app.add_option("--elastic", elastic,
                 "Go on without a lost rank while MIN are left, and replace\n"
                 "it, up to MAX ranks (default N); for programs that call\n"
                 "regroup or run_elastic")
      ->type_name("MIN[:MAX]");
  app.add_option("--elastic-start", start_limit_s,
                 "Time from the start of a replacement to its init_dist;\n"
                 "one that takes longer is killed (default 300)")
      ->check(number(0.1, 86'400.0, "seconds"))
      ->type_name("SECONDS");
  double lease_s = 5;
  app.add_option("--elastic-lease", lease_s,
                 "Of several nodes: time without a word from node 0 after\n"
                 "which a node is lost (default 5)")
      ->check(number(0.5, 3'600.0, "seconds"))
      ->type_name("SECONDS");
  app.add_option("--grace", grace_s, "Time from SIGTERM or Ctrl-C to SIGKILL (default 10)")
      ->check(number(0.0, 86'400.0, "seconds"))
      ->type_name("SECONDS");
  app.add_option("--bind", options.bind,
                 "core: rank R runs on the R-th allowed core, modulo their\n"
                 "number (default none)")
      ->transform(choice<run::Bind>({{"core", run::Bind::core}, {"none", run::Bind::none}}))
      ->type_name("core|none");
  std::string stdin_rank = "0";
  app.add_option("--stdin", stdin_rank,
                 "Which rank reads the standard input, a terminal too, as\n"
                 "a debugger's prompt does; the others read nothing\n"
                 "(default 0)")
      ->type_name("RANK|none");
  app.add_option("--prefix", options.prefix,
                 "[R] before each line of rank R, coloured on a terminal;\n"
                 "auto (the default): on a terminal only")
      ->transform(choice<run::Prefix>({{"auto", run::Prefix::automatic},
                                       {"always", run::Prefix::always},
                                       {"never", run::Prefix::never}}))
      ->type_name("auto|always|never");

  std::string trace_file;
  app.add_option("--trace", trace_file,
                 "Write the calls and regions of all ranks to FILE for\n"
                 "Perfetto; see lockstep trace --help. With --nnodes each\n"
                 "node writes its own, FILE.node-R.json of FILE.json")
      ->check(not_empty())
      ->type_name("FILE");

  run::NodesOptions& nodes = options.nodes;
  std::string rendezvous;
  double rendezvous_timeout_s = 300;
  app.add_option("--nnodes", nodes.n_nodes, "Number of machines that start one world (default 1)")
      ->check(number(1, 65'536, "a whole number"))
      ->type_name("N");
  app.add_option("--node-rank", nodes.node_rank, "The number of this machine, from 0")
      ->check(number(0, 65'535, "a whole number"))
      ->type_name("R");
  app.add_option("--rdzv", rendezvous,
                 "Where node 0 waits for the others: an address of its\n"
                 "machine and a free port")
      ->type_name("HOST:PORT");
  std::string secret_file;
  app.add_option("--rdzv-secret", secret_file,
                 "A secret of 16 to 64 bytes, the same on all nodes; a node\n"
                 "without it is rejected")
      ->check(not_empty())
      ->type_name("FILE");
  app.add_option("--rdzv-timeout", rendezvous_timeout_s,
                 "Time until all nodes have connected (default 300)")
      ->check(number(0.1, 86'400.0, "seconds"))
      ->type_name("SECONDS");

  const OwnWords own = own_words(app, arguments);
  const auto end = arguments.begin() + static_cast<std::ptrdiff_t>(own.n);
  if (!own.unknown.empty()) {
    const bool has_number = std::any_of(arguments.begin(), end, [](const std::string& word) {
      return word == "-n" || is_number_of_ranks(word);
    });
    fmt::print(stderr, "lockstep run: unknown option '{}'{}\nSee lockstep run --help\n",
               own.unknown, has_number ? "" : "; the number of ranks is -n N");
    return kUsageExitCode;
  }
  if (const auto exit_code = parse(app, {arguments.begin(), end})) return *exit_code;
  options.command.assign(end, arguments.end());
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  }
  if (options.command.empty()) {
    fmt::print(stderr,
               "lockstep run: no program to start; expected e.g. lockstep run -n {} -- ./train\n"
               "See lockstep run --help\n",
               options.n_ranks);
    return kUsageExitCode;
  }
  nodes.timeout = std::chrono::milliseconds(static_cast<long>(rendezvous_timeout_s * 1000));
  std::string wrong = check_nodes(app, nodes, rendezvous);
  if (wrong.empty() && app.count("--elastic") > 0) wrong = read_elastic(elastic, options);
  if (wrong.empty() && app.count("--elastic-start") > 0 && app.count("--elastic") == 0) {
    wrong = "--elastic-start is a limit for replacements, which only --elastic starts";
  }
  if (wrong.empty() && app.count("--elastic-lease") > 0 &&
      (options.elastic.least == 0 || nodes.n_nodes == 1)) {
    wrong = "--elastic-lease is of the nodes of an elastic job: it needs --elastic and --nnodes";
  }
  if (wrong.empty()) wrong = read_stdin_rank(stdin_rank, options);
  if (wrong.empty() && !secret_file.empty()) wrong = read_secret(secret_file, nodes.secret);
  if (!wrong.empty()) {
    fmt::print(stderr, "lockstep run: {}\nSee lockstep run --help\n", wrong);
    return kUsageExitCode;
  }
  if (!log_dir.empty()) options.log_dir = log_dir;
  try {
    options.env = Env::read();
  } catch (const UsageError& error) {  // names init_dist, which the program may not call
    throw run::usage_error(error.text());
  }
  options.elastic.lease = std::chrono::milliseconds(static_cast<long>(lease_s * 1000));
  options.elastic.start_limit = std::chrono::milliseconds(static_cast<long>(start_limit_s * 1000));
  options.grace = std::chrono::milliseconds(static_cast<long>(grace_s * 1000));
  if (app.count("--trace") == 0) return run::launch_ranks(options);
  return tracing::run_traced(trace_file, nodes, [&] { return run::launch_ranks(options); });
}

}  // namespace lockstep::cli
