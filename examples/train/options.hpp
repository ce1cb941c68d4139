#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace train {

enum class Model { convnet, resnet18 };
enum class Precision { f32, f64 };

std::string name_of(Model model);
std::string name_of(Precision precision);

/// The command-line options; add_options has the description of each flag.
struct Options {
  std::filesystem::path data;
  std::size_t n_classes = 0;
  Model model = Model::convnet;
  Precision precision = Precision::f32;
  bool sync_bn = true;
  std::size_t epochs = 10;
  std::size_t max_steps = 0;
  std::size_t batch = 64;
  std::vector<std::size_t> shares;
  double learning_rate = 0.05;
  double momentum = 0.9;
  double weight_decay = 5e-4;
  std::optional<std::uint64_t> seed;
  int threads = 0;
  std::size_t data_parallel = 1;
  std::filesystem::path save;
  std::filesystem::path load;
  std::filesystem::path metrics;
  std::size_t metrics_every = 0;
  std::vector<std::filesystem::path> compare;
  int n_restarts = 0;  ///< restarts of the ranks by the launcher; not a command-line flag
};

void add_options(CLI::App& app, Options& options);

/// The digits data set that lockstep ships: next to the installed program, else in the source tree.
std::filesystem::path shipped_digits();

}  // namespace train
