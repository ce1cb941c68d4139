#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <lockstep/env.hpp>
#include <lockstep/world.hpp>
#include <stdexcept>

#include "train.hpp"

namespace {

/// The digits that lockstep ships: next to the installed program, else in the source tree.
std::string shipped_digits() {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  const auto installed = program.parent_path().parent_path() / INSTALLED_DATA;
  return std::filesystem::is_directory(installed) ? installed : SOURCE_DATA;
}

void add_options(CLI::App& app, train::Options& options) {
  // CLI11 alone takes -1 for the largest unsigned number.
  const CLI::Range from_0(std::size_t{0}, std::size_t{1} << 31U);
  const CLI::Range from_1(std::size_t{1}, std::size_t{1} << 31U);
  const auto add = [&app](const char* name, auto& value, const char* text) {
    return app.add_option(name, value, text)->capture_default_str();
  };
  options.data = shipped_digits();
  add("--data", options.data, "folder of MNIST's files, or others of their form, plain or .gz");
  add("--model", options.model, "the network")->check(CLI::IsMember({"convnet", "resnet18"}));
  add("--precision", options.precision, "of the network")->check(CLI::IsMember({"f32", "f64"}));
  add("--sync-bn", options.sync_bn, "on: BatchNorm over all ranks' images; off: each rank's own");
  add("--epochs", options.epochs, "passes over the training images")->check(from_0);
  add("--max-steps", options.max_steps, "maximum number of steps; 0: no limit")->check(from_0);
  add("--batch", options.batch, "images per step, over all ranks")->check(from_1);
  add("--seed", options.seed, "of the parameters and the order of the images")->check(from_0);
  add("--threads", options.threads, "libtorch's threads per rank; 0: its default, 1 with --shards")
      ->check(from_0);
  add("--data-parallel", options.data_parallel, "replicas in each rank")->check(from_1);
  add("--shards", options.shards,
      "divide each step into so many parts: the same bits on any number of ranks up to it; 0: each "
      "rank is one part")
      ->check(from_0);
  add("--backend", options.backend, "auto, shared, gloo, hierarchical, mpi");
  add("--save", options.save, "write a checkpoint here after every epoch");
  add("--load", options.load, "resume from this checkpoint");
  add("--metrics", options.metrics, "append JSON lines to this file: one per epoch, and a summary");
  add("--metrics-every", options.metrics_every, "also write the mean loss every N steps; 0: never")
      ->check(from_0);
  add("--compare", options.compare, "print how much two checkpoints differ")->expected(2);
  add("--dump", options.dump, "write the bytes of a checkpoint's parameters to standard output");
}

void run(const train::Options& options) {
  if (!options.compare.empty()) {
    const auto difference = train::compare(options, options.compare[0], options.compare[1]);
    fmt::print("{:.3g} {}\n", difference.largest, difference.name);
    return;
  }
  if (!options.dump.empty()) {
    const std::string bytes = train::dump(options, options.dump);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    return;
  }
  // Read first: errors in the files are reported before any rank waits for another.
  const train::Dataset data = train::read_dataset(options.data);
  train::run(options, data);
  lockstep::destroy_dist();
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int kUsage = 2;
  CLI::App app("Trains an image classifier, alone or as one rank of `lockstep run`.",
               "lockstep-train");
  train::Options options;
  try {
    add_options(app, options);
    app.parse(argc, argv);
    options.n_restarts = lockstep::Env::read().restart;
    run(options);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "lockstep-train: {}\n", error.what());
    lockstep::destroy_dist(error.what());  // the other ranks get PeerFailed with this text
    return dynamic_cast<const std::invalid_argument*>(&error) != nullptr ? kUsage : 1;
  }
}
