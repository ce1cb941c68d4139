#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

/// Readers of common image data sets. Independent of libtorch: bytes in, bytes out.
namespace train {

/// A missing, truncated or malformed file: what() names the file, the offset and what was expected.
class DataError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// n contiguous images of channels x height x width bytes, and the label of each.
struct Images {
  std::size_t channels = 0;
  std::size_t height = 0;
  std::size_t width = 0;
  std::vector<std::uint8_t> pixels;
  std::vector<std::uint8_t> labels;

  std::size_t size() const { return labels.size(); }
  std::size_t image_bytes() const { return channels * height * width; }
};

struct Dataset {
  Images train;
  Images test;
  std::size_t n_classes = 0;  ///< labels are 0 .. n_classes - 1
};

/// Reads and validates a complete image set:
/// - MNIST, Fashion-MNIST and compatible: train-images-idx3-ubyte, train-labels-idx1-ubyte,
///   t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, each plain or .gz;
/// - EMNIST: emnist-SPLIT-train-images-idx3-ubyte, ..., emnist-SPLIT-test-images-idx3-ubyte, ...;
///   if a directory has several splits, `path` is DIRECTORY/emnist-SPLIT;
/// - CIFAR-10 binary: data_batch_1.bin to data_batch_5.bin, test_batch.bin.
/// n_classes: 0 infers it from the file names (10; EMNIST: that of the split).
/// Throws DataError.
Dataset read_dataset(const std::filesystem::path& path, std::size_t n_classes = 0);

/// Parses an IDX file of images (magic 0x00000803); no labels. `name`: for errors.
Images parse_idx_images(std::span<const std::uint8_t> bytes, const std::string& name);
/// Parses an IDX file of labels (magic 0x00000801).
std::vector<std::uint8_t> parse_idx_labels(std::span<const std::uint8_t> bytes,
                                           const std::string& name);
/// Parses a CIFAR-10 binary file, records of one label and 3x32x32 bytes, and appends to `images`.
void parse_cifar10(std::span<const std::uint8_t> bytes, const std::string& name, Images& images);

}  // namespace train
