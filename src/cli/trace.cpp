#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <lockstep/error.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/files.hpp"
#include "cli/parse.hpp"
#include "cli/subcommands.hpp"
#include "cli/trace/trace_data.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kTraceFooter = R"(Example:
  lockstep run -n 4 --trace trace.json -- ./train
  lockstep trace summary trace.json

summary: calls are counted over all ranks; waiting is from a call's start to
the start of its last peer; awaited is how long the other ranks waited for this one.

merge: FILE of several inputs, each a trace of one node (`lockstep run --nnodes`)
or a folder of traces of ranks on this machine (LOCKSTEP_TRACE). Times are those
of the first one's clock. https://ui.perfetto.dev and chrome://tracing show FILE.

Exit code: 0. 2: not a trace, or an invalid command line. 1: system error.)";

}  // namespace

int trace(const std::vector<std::string>& arguments) {
  CLI::App app("Summarises where a traced run spent its time, or merges traces.", "lockstep trace");
  app.set_help_flag("-h,--help", "Print this help");
  app.footer(kTraceFooter);
  app.require_subcommand(1);
  std::string file;
  CLI::App* const summary = app.add_subcommand(
      "summary", "Print the time per operation, the waits, and the slowest rank");
  summary->add_option("FILE", file)->required()->type_name("");
  std::vector<std::string> inputs;
  CLI::App* const merge = app.add_subcommand("merge", "Merge traces into one");
  merge->add_option("FILE", file, "The merged trace: a file that is not there")
      ->required()
      ->type_name("");
  merge->add_option("INPUT", inputs, "Files or folders")->required()->type_name("...");
  for (CLI::App* const subcommand : {summary, merge})
    subcommand->set_help_flag("-h,--help", "Print this help");
  if (const auto exit_code = parse(app, arguments)) return *exit_code;

  if (summary->parsed()) {
    fmt::print("{}", printable(tracing::summary_of(tracing::read_file(file))));
    return 0;
  }
  check_is_replaceable("lockstep trace merge", file);
  if (std::filesystem::exists(file)) {  // it may be an input whose output file was forgotten
    reject(
        "lockstep trace merge",
        fmt::format("'{}' exists; give the name of a new file first, for the merged trace", file));
  }
  std::vector<tracing::Trace> traces;
  for (const std::string& input : inputs) {
    const bool is_folder = std::filesystem::is_directory(input);
    traces.push_back(is_folder ? tracing::read_folder(input) : tracing::read_file(input));
    if (is_folder && traces.back().rows.empty()) {
      throw UsageError(
          {.operation = "lockstep trace merge"},
          fmt::format("'{}' contains no traces of ranks with LOCKSTEP_TRACE={}", input, input));
    }
  }
  tracing::write(tracing::merge(std::move(traces)), file);
  return 0;
}

}  // namespace lockstep::cli
