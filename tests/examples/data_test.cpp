#include "train/data.hpp"

#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "support/temporary_folder.hpp"

namespace train {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes idx(std::vector<std::uint32_t> dims, std::size_t n_data, std::uint8_t value = 0) {
  Bytes bytes = {0, 0, 0x08, static_cast<std::uint8_t>(dims.size())};
  for (const std::uint32_t dim : dims) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      bytes.push_back(static_cast<std::uint8_t>(dim >> shift));
    }
  }
  bytes.insert(bytes.end(), n_data, value);
  return bytes;
}

void write_file(const std::filesystem::path& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

Bytes read_plain(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_gzip(const std::filesystem::path& path, const Bytes& bytes) {
  gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
            static_cast<int>(bytes.size()));
  gzclose(file);
}

/// Four good MNIST-like files: 6 and 3 images of 5x4.
class DataTest : public testing::Test {
 protected:
  DataTest() {
    write_file(directory_ / "train-images-idx3-ubyte", idx({6, 5, 4}, 120, 7));
    write_file(directory_ / "train-labels-idx1-ubyte", idx({6}, 6, 3));
    write_file(directory_ / "t10k-images-idx3-ubyte", idx({3, 5, 4}, 60, 8));
    write_file(directory_ / "t10k-labels-idx1-ubyte", idx({3}, 3, 9));
  }

  /// Reads the directory and expects an error that says all of `parts`.
  void expect_error(const std::vector<std::string>& parts) {
    expect_error_at(directory_.path(), parts);
  }
  void expect_error_at(const std::filesystem::path& path, const std::vector<std::string>& parts) {
    try {
      read_dataset(path);
      ADD_FAILURE() << "no error";
    } catch (const DataError& error) {
      for (const std::string& part : parts) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
            << "no \"" << part << "\" in: " << error.what();
      }
    }
  }

  lockstep::test::TemporaryFolder directory_;
};

TEST_F(DataTest, reads_plain_files) {
  const Dataset set = read_dataset(directory_.path());
  EXPECT_EQ(set.train.size(), 6U);
  EXPECT_EQ(set.test.size(), 3U);
  EXPECT_EQ(set.train.height, 5U);
  EXPECT_EQ(set.train.width, 4U);
  EXPECT_EQ(set.train.pixels, Bytes(120, 7));
  EXPECT_EQ(set.test.labels, Bytes(3, 9));
}

TEST_F(DataTest, a_gzip_file_is_unpacked_no_further_than_its_header_says) {
  // 16 MiB of zeros in 16 KiB, one thousandth of what a bomb unpacks to. A file that is unpacked to
  // its end shows that by the damage at its end.
  const auto write_bomb = [&](const Bytes& header) {
    Bytes bytes = header;
    bytes.resize(std::size_t{16} << 20U);
    const auto path = directory_ / "train-images-idx3-ubyte.gz";
    write_gzip(path, bytes);
    std::filesystem::remove(directory_ / "train-images-idx3-ubyte");
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 10);
  };
  write_bomb({1, 2, 3});
  expect_error({"train-images-idx3-ubyte.gz", "offset 0", "expected 00 00 08 03"});
  write_bomb(idx({6, 5, 4}, 0));
  expect_error({"train-images-idx3-ubyte.gz", "offset 136", "more bytes"});
}

TEST_F(DataTest, reads_gzip_as_plain) {
  const Dataset shipped = read_dataset(LOCKSTEP_DIGITS);
  EXPECT_EQ(shipped.train.size(), 1440U);
  EXPECT_EQ(shipped.test.size(), 357U);
  EXPECT_EQ(shipped.train.height, 28U);
  EXPECT_EQ(shipped.train.width, 28U);
  EXPECT_EQ(shipped.train.pixels.size(), 1440U * 28U * 28U);
  std::vector<int> per_class(10);
  for (const std::uint8_t label : shipped.train.labels) ++per_class[label];
  EXPECT_GT(*std::min_element(per_class.begin(), per_class.end()), 100);

  Bytes unpacked = idx({1440, 28, 28}, 0);
  unpacked.insert(unpacked.end(), shipped.train.pixels.begin(), shipped.train.pixels.end());
  for (const char* name :
       {"train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"}) {
    std::filesystem::remove(directory_ / std::filesystem::path(name).stem().string());
    std::filesystem::copy(std::filesystem::path(LOCKSTEP_DIGITS) / name, directory_ / name);
  }
  write_file(directory_ / "train-images-idx3-ubyte", unpacked);
  EXPECT_EQ(read_dataset(directory_.path()).train.pixels, shipped.train.pixels);
}

TEST_F(DataTest, absent_file) {
  std::filesystem::remove(directory_ / "t10k-labels-idx1-ubyte");
  expect_error({"t10k-labels-idx1-ubyte.gz", "no such file, with or without .gz"});
}

TEST_F(DataTest, absent_directory) {
  expect_error_at(directory_ / "nowhere", {"nowhere", "expected a folder"});
}

TEST_F(DataTest, directory_without_images) {
  const lockstep::test::TemporaryFolder empty;
  expect_error_at(empty.path(), {empty.path(), "train-images-idx3-ubyte"});
}

TEST_F(DataTest, unreadable_file) {
  std::filesystem::remove(directory_ / "train-images-idx3-ubyte");
  std::filesystem::create_directory(directory_ / "train-images-idx3-ubyte");
  expect_error({"train-images-idx3-ubyte", "offset 0", "directory"});
}

TEST_F(DataTest, empty_file) {
  write_file(directory_ / "train-images-idx3-ubyte", {});
  expect_error({"train-images-idx3-ubyte", "offset 0", "16 bytes"});
}

TEST_F(DataTest, truncated_header) {
  Bytes bytes = idx({6, 5, 4}, 120);
  bytes.resize(9);
  write_file(directory_ / "train-images-idx3-ubyte", bytes);
  expect_error({"train-images-idx3-ubyte", "offset 9", "16 bytes"});
}

TEST_F(DataTest, truncated_pixels) {
  write_file(directory_ / "t10k-images-idx3-ubyte", idx({3, 5, 4}, 59));
  expect_error({"t10k-images-idx3-ubyte", "offset 75", "3 x 5 x 4 bytes"});
}

TEST_F(DataTest, trailing_bytes) {
  write_file(directory_ / "train-labels-idx1-ubyte", idx({6}, 8));
  expect_error({"train-labels-idx1-ubyte", "offset 14", "more bytes", "expected 6 bytes"});
}

TEST_F(DataTest, wrong_magic) {
  Bytes bytes = idx({6, 5, 4}, 120);
  bytes[1] = 0x50;
  write_file(directory_ / "train-images-idx3-ubyte", bytes);
  expect_error({"train-images-idx3-ubyte", "offset 0", "00 50 08 03", "expected 00 00 08 03"});
}

TEST_F(DataTest, wrong_element_type) {
  Bytes bytes = idx({6, 5, 4}, 120);
  bytes[2] = 0x0d;
  write_file(directory_ / "train-images-idx3-ubyte", bytes);
  expect_error({"train-images-idx3-ubyte", "offset 0", "00 00 0d 03", "expected 00 00 08 03"});
}

TEST_F(DataTest, labels_where_images_belong) {
  write_file(directory_ / "train-images-idx3-ubyte", idx({16}, 16));
  expect_error({"train-images-idx3-ubyte", "offset 0", "00 00 08 01", "in 3 dimensions"});
}

TEST_F(DataTest, dimension_of_zero) {
  write_file(directory_ / "train-images-idx3-ubyte", idx({6, 0, 4}, 0));
  expect_error({"train-images-idx3-ubyte", "offset 4", "6 x 0 x 4"});
}

TEST_F(DataTest, dimensions_past_64_bits) {
  // Their product is 2^64: 0 where it wraps.
  write_file(directory_ / "train-images-idx3-ubyte", idx({0x80000000, 0x80000000, 4}, 0));
  expect_error({"train-images-idx3-ubyte", "offset 4", "2147483648 x 2147483648 x 4"});
}

TEST_F(DataTest, fewer_labels_than_images) {
  write_file(directory_ / "train-labels-idx1-ubyte", idx({5}, 5));
  expect_error({"train-labels-idx1-ubyte", "offset 4", "5 labels", "6 images"});
}

TEST_F(DataTest, label_out_of_range) {
  Bytes bytes = idx({3}, 3, 9);
  bytes[10] = 10;
  write_file(directory_ / "t10k-labels-idx1-ubyte", bytes);
  expect_error({"t10k-labels-idx1-ubyte", "offset 10", "label 10", "expected 0 to 9"});
}

TEST_F(DataTest, test_images_of_another_size) {
  write_file(directory_ / "t10k-images-idx3-ubyte", idx({3, 4, 5}, 60));
  expect_error({"4 x 5", "expected 5 x 4"});
}

TEST_F(DataTest, truncated_gzip) {
  std::filesystem::remove(directory_ / "train-images-idx3-ubyte");
  Bytes noise = idx({6, 5, 4}, 120);
  std::mt19937 random(1);
  std::generate(noise.begin() + 16, noise.end(), [&] { return std::uint8_t(random()); });
  const auto path = directory_ / "train-images-idx3-ubyte.gz";
  write_gzip(path, noise);
  Bytes packed = read_plain(path);
  packed.resize(packed.size() / 2);
  write_file(path, packed);
  expect_error({"train-images-idx3-ubyte.gz", "offset", "unexpected end of file"});
}

TEST_F(DataTest, corrupt_gzip) {
  std::filesystem::remove(directory_ / "train-images-idx3-ubyte");
  const auto path = directory_ / "train-images-idx3-ubyte.gz";
  write_gzip(path, idx({6, 5, 4}, 120));
  Bytes packed = read_plain(path);
  packed[packed.size() - 6] ^= 0xff;  // in its checksum
  write_file(path, packed);
  expect_error({"train-images-idx3-ubyte.gz", "offset", "incorrect data check"});
}

TEST_F(DataTest, survives_mutations) {
  std::mt19937 random(7);
  const Bytes good_images = idx({6, 5, 4}, 120);
  const Bytes good_labels = idx({6}, 6);
  std::size_t n_errors = 0;
  for (int i = 0; i < 1'000; ++i) {
    Bytes bytes = i % 2 == 0 ? good_images : good_labels;
    for (auto n = random() % 3; n > 0; --n) {
      bytes[random() % std::min<std::size_t>(bytes.size(), 20)] = std::uint8_t(random());
    }
    bytes.resize(random() % 4 == 0 ? random() % (bytes.size() + 8) : bytes.size());
    write_file(directory_ / "mutated", bytes);
    for (const std::size_t n_dims : {1, 3}) {
      try {
        const Idx read = read_idx(directory_ / "mutated", n_dims);
        ASSERT_EQ(read.sizes.size(), n_dims);
        ASSERT_EQ(read.bytes.size(), bytes.size() - 4 - 4 * n_dims);
      } catch (const DataError&) {
        ++n_errors;
      }
    }
  }
  EXPECT_GT(n_errors, 1'000U);
}

}  // namespace
}  // namespace train
