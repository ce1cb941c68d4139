#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <lockstep/env.hpp>
#include <lockstep/launch.hpp>
#include <string>

#include "train/checkpoint.hpp"
#include "train/data.hpp"
#include "train/options.hpp"
#include "train/trainer.hpp"

namespace {

constexpr int kUsage = 2;

void run(const train::Options& options, const std::string& backend) {
  if (!options.compare.empty()) {
    const auto difference = train::compare_checkpoints(options.compare[0], options.compare[1]);
    fmt::print("{:.3g} {}\n", difference.largest, difference.name);
    return;
  }
  // Read the files first: errors in them are reported before any rank waits for another.
  const train::Dataset data = train::read_dataset(options.data, options.n_classes);
  train::Trainer trainer(options, data);
  lockstep::init_dist({.backend = backend});
  trainer.run(lockstep::default_group());
  lockstep::destroy_dist();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains an image classifier, alone or as one rank of `lockstep run`.",
               "lockstep-train");
  train::Options options;
  train::add_options(app, options);
  std::string backend = "auto";
  app.add_option("--backend", backend,
                 "How the ranks communicate: auto, shared, gloo, hierarchical, mpi")
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  try {
    options.n_restarts = lockstep::Env::read().restart;
    run(options, backend);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "lockstep-train: {}\n", error.what());
    lockstep::destroy_dist(error.what());  // the other ranks get PeerFailed with this text
    return dynamic_cast<const std::invalid_argument*>(&error) != nullptr ? kUsage : 1;
  }
}
