#include "data.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, std::size_t offset, const std::string& text) {
  throw DataError(fmt::format("cannot read {}, offset {}: {}", path.string(), offset, text));
}

Images read_images(const fs::path& folder, const std::string& set) {
  const fs::path labels_path = folder / (set + "-labels-idx1-ubyte");
  Idx images = read_idx(folder / (set + "-images-idx3-ubyte"), /*n_dims=*/3);
  Idx labels = read_idx(labels_path, /*n_dims=*/1);
  if (labels.sizes[0] != images.sizes[0]) {
    fail(labels_path, 4,
         fmt::format("{} labels, expected one for each of {} images", labels.sizes[0],
                     images.sizes[0]));
  }
  const auto wrong = std::find_if(labels.bytes.begin(), labels.bytes.end(),
                                  [](std::uint8_t label) { return label >= kClasses; });
  if (wrong != labels.bytes.end()) {
    fail(labels_path, 8 + static_cast<std::size_t>(wrong - labels.bytes.begin()),
         fmt::format("label {}, expected 0 to {}", *wrong, kClasses - 1));
  }
  return {.height = images.sizes[1],
          .width = images.sizes[2],
          .pixels = std::move(images.bytes),
          .labels = std::move(labels.bytes)};
}

}  // namespace

Idx read_idx(fs::path path, std::size_t n_dims) {
  if (!fs::exists(path)) path += ".gz";
  if (!fs::exists(path)) {
    throw DataError(
        fmt::format("cannot open {}: no such file, with or without .gz", path.string()));
  }
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) {
    throw DataError(fmt::format("cannot open {}: {}", path.string(), std::strerror(errno)));
  }
  std::vector<std::uint8_t> bytes;
  // Appends at most n bytes; false at the end of the file.
  const auto read = [&](std::size_t n) {
    const std::size_t begin = bytes.size();
    bytes.resize(begin + n);
    const int n_read = gzread(file.get(), bytes.data() + begin, static_cast<unsigned>(n));
    bytes.resize(begin + static_cast<std::size_t>(std::max(n_read, 0)));
    int status = Z_OK;
    std::string_view error = gzerror(file.get(), &status);
    if (error.starts_with(path.string() + ": ")) error.remove_prefix(path.string().size() + 2);
    if (status != Z_OK) fail(path, bytes.size(), std::string(error));
    return n_read > 0;
  };
  // In steps, because a damaged header may announce more bytes than there is memory.
  const auto read_until = [&](std::size_t end, const std::string& expected) {
    constexpr std::size_t kStep = 1 << 20;
    while (bytes.size() < end) {
      if (read(std::min(kStep, end - bytes.size()))) continue;
      fail(path, bytes.size(), "the file ends here, expected " + expected);
    }
  };

  const std::size_t n_header = 4 + 4 * n_dims;
  read_until(n_header, fmt::format("a header of {} bytes", n_header));
  const std::array<std::size_t, 4> magic = {0, 0, 0x08, n_dims};
  if (!std::equal(magic.begin(), magic.end(), bytes.begin())) {
    fail(path, 0,
         fmt::format("{:02x}, expected {:02x}: an IDX file of bytes in {} dimensions",
                     fmt::join(bytes.begin(), bytes.begin() + 4, " "), fmt::join(magic, " "),
                     n_dims));
  }
  Idx idx;
  std::size_t n_values = 1;
  bool overflows = false;
  for (std::size_t at = 4; at < n_header; at += 4) {
    idx.sizes.push_back(std::size_t{bytes[at]} << 24U | std::size_t{bytes[at + 1]} << 16U |
                        std::size_t{bytes[at + 2]} << 8U | bytes[at + 3]);
    overflows |= __builtin_mul_overflow(n_values, idx.sizes.back(), &n_values);
  }
  const auto expected = fmt::format("{} bytes after the header", fmt::join(idx.sizes, " x "));
  if (n_values == 0 || overflows) fail(path, 4, "no file has " + expected);
  read_until(n_header + n_values, expected);
  // At the end of a gzip file this compares its checksum. Of a longer one no more is unpacked: it
  // may unpack to more than there is memory.
  if (read(1)) fail(path, bytes.size() - 1, "more bytes, expected " + expected);
  idx.bytes.assign(bytes.begin() + static_cast<std::ptrdiff_t>(n_header), bytes.end());
  return idx;
}

Dataset read_dataset(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw DataError(fmt::format("cannot open {}: expected a folder of images", folder.string()));
  }
  Dataset set{.train = read_images(folder, "train"), .test = read_images(folder, "t10k")};
  if (set.train.height != set.test.height || set.train.width != set.test.width) {
    throw DataError(fmt::format(
        "cannot use {}: its test images are {} x {}, expected {} x {} as in training",
        folder.string(), set.test.height, set.test.width, set.train.height, set.train.width));
  }
  return set;
}

}  // namespace train
