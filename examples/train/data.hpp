#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

/// Reads MNIST and data sets of the same form, such as Fashion-MNIST. Needs no libtorch.
namespace train {

constexpr std::size_t kClasses = 10;

/// A file that is missing or damaged: what() names it, the offset and what was expected.
class DataError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The unsigned bytes of an IDX file, in as many dimensions as there are sizes.
struct Idx {
  std::vector<std::size_t> sizes;
  std::vector<std::uint8_t> bytes;
};

/// Reads `path` or `path`.gz. Throws DataError.
Idx read_idx(std::filesystem::path path, std::size_t n_dims);

struct Images {
  std::size_t height = 0, width = 0;
  std::vector<std::uint8_t> pixels;  ///< size() x height x width
  std::vector<std::uint8_t> labels;  ///< 0 .. kClasses - 1

  std::size_t size() const { return labels.size(); }
};

struct Dataset {
  Images train, test;
};

/// Reads train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
/// t10k-labels-idx1-ubyte in `folder`, each plain or .gz. Throws DataError.
Dataset read_dataset(const std::filesystem::path& folder);

}  // namespace train
