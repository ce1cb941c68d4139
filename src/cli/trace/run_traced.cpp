#include "cli/trace/run_traced.hpp"

#include <fmt/format.h>
#include <stdlib.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <lockstep/error.hpp>

#include "cli/files.hpp"
#include "cli/subcommands.hpp"
#include "cli/trace/trace_data.hpp"

namespace lockstep::cli::tracing {
namespace {

namespace fs = std::filesystem;

/// trace.json -> trace.node-1.json
fs::path of_node(fs::path file, int node_rank) {
  const std::string extension = file.extension();
  return file.replace_extension(fmt::format("node-{}{}", node_rank, extension));
}

/// A folder accessible only to this user, next to the file, so on the same disk.
class Folder {
 public:
  explicit Folder(const fs::path& file) {
    std::string path = file.string() + ".XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) {
      reject("lockstep run", fmt::format("--trace: cannot make a file in '{}': {}",
                                         file.parent_path().string(), std::strerror(errno)));
    }
    path_ = path;
  }
  ~Folder() {
    std::error_code ignored;
    if (!is_kept) fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }
  bool is_kept = false;

 private:
  std::string path_;
};

void say(const std::string& text) { fmt::print(stderr, "lockstep run: {}\n", text); }

}  // namespace

int run_traced(const std::string& file, const run::NodesOptions& nodes,
               const std::function<int()>& launch) {
  if (file.empty()) reject("lockstep run", "--trace: the file's name is empty");
  std::error_code error;
  fs::path path = fs::absolute(file, error);
  if (nodes.n_nodes > 1) path = of_node(path, nodes.node_rank);
  check_is_replaceable("lockstep run: --trace", path);
  Folder folder(path);
  ::setenv("LOCKSTEP_TRACE", folder.path().c_str(), /*overwrite=*/1);
  const int exit_code = launch();
  try {
    const Trace trace = read_folder(folder.path());
    write(trace, path.string());
    say(trace.rows.empty()
            ? fmt::format("{} is empty: no rank has joined a world by init_dist or run_ranks",
                          path.string())
            : fmt::format("{} has {} events; see lockstep trace summary, or ui.perfetto.dev",
                          path.string(), trace.events.size()));
    return exit_code;
  } catch (const std::exception& failure) {
    folder.is_kept = true;
    say(fmt::format(
        "{}. The ranks' traces are in {}; lockstep trace merge builds the file from them",
        failure.what(), folder.path()));
    return exit_code != 0 ? exit_code : 1;
  }
}

}  // namespace lockstep::cli::tracing
