#include "train/options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <limits>
#include <map>
#include <string>
#include <system_error>

namespace train {
namespace {

const std::map<std::string, Model> kModels{{"convnet", Model::convnet},
                                           {"resnet18", Model::resnet18}};
const std::map<std::string, Precision> kPrecisions{{"f32", Precision::f32},
                                                   {"f64", Precision::f64}};
constexpr double kLargest = std::numeric_limits<double>::max();
const std::map<std::string, bool> kSwitch{{"on", true}, {"off", false}};

template <class T>
std::string key_of(const std::map<std::string, T>& names, T value) {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return "?";
}

/// A flag that takes one of several words.
template <class T>
void add_choice(CLI::App& app, const std::string& flag, T& value,
                const std::map<std::string, T>& names, const std::string& text) {
  std::vector<std::string> words;
  for (const auto& [name, named] : names) words.push_back(name);
  app.add_option_function<std::string>(
         flag, [&](const std::string& word) { value = names.at(word); }, text)
      ->check(CLI::IsMember(words))
      ->default_str(key_of(names, value));
}

/// A finite number from 0 to `most`.
CLI::Validator rate(double most) {
  return CLI::Validator(
      [most](const std::string& text) -> std::string {
        double value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= 0 && value <= most) return {};
        return most == kLargest
                   ? fmt::format("got '{}', expected a number from 0", text)
                   : fmt::format("got '{}', expected a number from 0 to {}", text, most);
      },
      /*validator_desc=*/"");
}

/// Rejects -1, which would otherwise be parsed as the largest unsigned number.
CLI::Validator count() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        std::uint64_t value = 0;
        const char* const end = text.data() + text.size();
        const auto [rest, error] = std::from_chars(text.data(), end, value);
        if (error == std::errc() && rest == end) return {};
        return fmt::format("got '{}', expected a whole number from 0", text);
      },
      /*validator_desc=*/"");
}

}  // namespace

std::string name_of(Model model) { return key_of(kModels, model); }
std::string name_of(Precision precision) { return key_of(kPrecisions, precision); }

void add_options(CLI::App& app, Options& options) {
  options.data = shipped_digits();
  app.add_option("--data", options.data,
                 "directory of MNIST, Fashion-MNIST, EMNIST (IDX, plain or .gz) or CIFAR-10 "
                 "(binary) files")
      ->capture_default_str();
  app.add_option("--classes", options.n_classes, "number of classes; 0: from the files' names")
      ->check(count())
      ->capture_default_str();
  add_choice(app, "--model", options.model, kModels, "the network");
  add_choice(app, "--precision", options.precision, kPrecisions,
             "precision of parameters and arithmetic");
  add_choice(app, "--sync-bn", options.sync_bn, kSwitch,
             "BatchNorm statistics over all ranks, or each rank's own");
  app.add_option("--epochs", options.epochs, "passes over the training images")
      ->check(count())
      ->capture_default_str();
  app.add_option("--max-steps", options.max_steps, "maximum number of steps; 0: no limit")
      ->check(count())
      ->capture_default_str();
  app.add_option("--batch", options.batch, "images per step, over all ranks")
      ->check(count() & CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option(
         "--shares", options.shares,
         "images per step on each rank, for example 5,2,1 (default: equal parts of --batch)")
      ->check(count())
      ->delimiter(',');
  app.add_option("--lr", options.learning_rate, "learning rate of SGD")
      ->check(rate(kLargest))
      ->capture_default_str();
  app.add_option("--momentum", options.momentum, "momentum of SGD")
      ->check(rate(1))
      ->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay, "weight decay of SGD")
      ->check(rate(kLargest))
      ->capture_default_str();
  app.add_option(
         "--seed", options.seed,
         "seed of the parameters and the order of the images (default: 1, or the checkpoint's)")
      ->check(count());
  app.add_option("--threads", options.threads, "libtorch's threads per rank; 0: its default")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--data-parallel", options.data_parallel,
                 "replicas of the network in each rank, which share its part of the batch")
      ->check(count() & CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--save", options.save,
                 "write a checkpoint here after every epoch; ranks restarted by `lockstep run "
                 "--max-restarts` resume from it");
  app.add_option("--load", options.load, "resume from this checkpoint");
  app.add_option("--metrics", options.metrics,
                 "append JSON lines to this file: one per epoch, and a summary");
  app.add_option("--metrics-every", options.metrics_every,
                 "also write a line with the mean loss every so many steps")
      ->check(count())
      ->capture_default_str();
  app.add_option("--compare", options.compare,
                 "only print the largest absolute difference between the parameters and buffers "
                 "of two checkpoints")
      ->expected(2);
}

std::filesystem::path shipped_digits() {
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  auto installed = program.parent_path().parent_path() / LOCKSTEP_TRAIN_INSTALLED_DATA;
  if (std::filesystem::is_directory(installed, ignored)) return installed;
  return LOCKSTEP_TRAIN_SOURCE_DATA;
}

}  // namespace train
