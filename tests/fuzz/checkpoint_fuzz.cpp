// Whatever the archive of a checkpoint holds, reading it returns a position that a training can go
// on from or throws a std::runtime_error. The archive itself is libtorch's: bytes that are none are
// its business, so what varies is what a whole archive holds.

#include <torch/torch.h>
#include <unistd.h>

#include <fuzzer/FuzzedDataProvider.h>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "train/checkpoint.hpp"

namespace {

using torch::serialize::OutputArchive;

void require(bool holds) {
  if (!holds) std::abort();
}

c10::IValue any_value(FuzzedDataProvider& data) {
  switch (data.ConsumeIntegralInRange(0, 6)) {
    case 0: return data.ConsumeIntegral<std::int64_t>();
    case 1: return data.ConsumeFloatingPoint<double>();
    case 2: return data.ConsumeRandomLengthString(16);
    case 3: return data.ConsumeBool();
    case 4: return torch::full({data.ConsumeIntegralInRange<std::int64_t>(0, 3)}, 1.0);
    case 5: return c10::List<std::int64_t>();
    default: return {};
  }
}

/// Writes what a checkpoint has at `key`, or nothing, or something else.
template <class T>
void write(OutputArchive& archive, const std::string& key, const T& usual,
           FuzzedDataProvider& data) {
  switch (data.ConsumeIntegralInRange(0, 3)) {
    case 0: break;
    case 1: archive.write(key, any_value(data)); break;
    default: archive.write(key, c10::IValue(usual)); break;
  }
}

template <class F>
void write_part(OutputArchive& archive, const std::string& key, FuzzedDataProvider& data, F save) {
  OutputArchive part(archive.compilation_unit());
  switch (data.ConsumeIntegralInRange(0, 4)) {
    case 0: return;
    case 1: archive.write(key, any_value(data)); return;
    case 2: {
      const std::string name = data.ConsumeRandomLengthString(8);
      // libtorch's writer takes names of attributes only.
      if (!name.empty() && name.find('.') == std::string::npos) part.write(name, any_value(data));
      break;
    }
    default: save(part); break;
  }
  archive.write(key, part);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  static const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("checkpoint_fuzz." + std::to_string(getpid()));
  FuzzedDataProvider data(bytes, size);
  torch::nn::Sequential model(torch::nn::Linear(2, 1), torch::nn::BatchNorm1d(1));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  try {
    OutputArchive archive;
    write_part(archive, "network", data, [&](OutputArchive& part) {
      const auto n = data.ConsumeIntegralInRange<std::int64_t>(1, 3);
      torch::nn::Sequential(torch::nn::Linear(2, n), torch::nn::BatchNorm1d(1))->save(part);
    });
    write_part(archive, "optimizer", data, [&](OutputArchive& part) { optimizer.save(part); });
    write(archive, "model", std::string("convnet"), data);
    write(archive, "precision", std::string("f32"), data);
    write(archive, "seed", data.ConsumeIntegral<std::int64_t>(), data);
    write(archive, "batch", data.ConsumeIntegral<std::int64_t>(), data);
    write(archive, "step", data.ConsumeIntegral<std::int64_t>(), data);
    write(archive, "epoch_loss_sum", data.ConsumeFloatingPoint<double>(), data);
    archive.save_to(path.string());
  } catch (const c10::Error&) {  // libtorch writes no such archive
    return 0;
  }
  try {
    const train::Position position =
        train::load_checkpoint(path, *model, optimizer, {.model = "convnet", .precision = "f32"});
    // 2^62: what a signed number of the archive can hold, and sums with it do not wrap.
    require(position.batch > 0 && position.batch < 1ULL << 62 && position.step < 1ULL << 62);
    require(model->forward(torch::ones({2, 2})).sizes() == torch::IntArrayRef({2, 1}));
  } catch (const std::runtime_error& error) {
    require(std::string(error.what()).rfind("cannot load", 0) == 0);
  }
  try {
    (void)train::compare_checkpoints(path, path);
  } catch (const c10::Error&) {
    std::abort();  // with a backtrace of libtorch's in what the user reads
  } catch (const std::runtime_error&) {
  }
  return 0;
}
