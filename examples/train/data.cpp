#include "train/data.hpp"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

namespace train {
namespace {

namespace fs = std::filesystem;
using Bytes = std::span<const std::uint8_t>;

constexpr std::size_t kIdxTypeOffset = 2;
constexpr std::uint8_t kIdxUnsignedBytes = 0x08;
constexpr std::size_t kCifarSide = 32;
constexpr std::size_t kCifarRecord = 1 + 3 * kCifarSide * kCifarSide;
constexpr std::size_t kCifarClasses = 10;
/// Maximum number of records in one file: that of the complete data set.
constexpr std::size_t kMaxCifarRecords = 60'000;

[[noreturn]] void fail(const std::string& name, std::size_t offset, const std::string& text) {
  throw DataError(fmt::format("cannot read {}, offset {}: {}", name, offset, text));
}

std::uint32_t big_endian(Bytes bytes, std::size_t offset) {
  return std::uint32_t{bytes[offset]} << 24 | std::uint32_t{bytes[offset + 1]} << 16 |
         std::uint32_t{bytes[offset + 2]} << 8 | std::uint32_t{bytes[offset + 3]};
}

/// The header of an IDX file of unsigned bytes.
template <std::size_t n_dims>
struct IdxHeader {
  static constexpr std::size_t kBytes = 4 + 4 * n_dims;
  std::array<std::size_t, n_dims> dims{};
  std::optional<std::size_t> n_file_bytes;  ///< nullopt: more than there can be
};

/// Looks at the first bytes only.
template <std::size_t n_dims>
IdxHeader<n_dims> read_idx_header(Bytes bytes, const std::string& name) {
  using Header = IdxHeader<n_dims>;
  if (bytes.size() < Header::kBytes) {
    fail(name, bytes.size(),
         fmt::format("the file ends here, expected an IDX header of {} bytes; fetch it again",
                     Header::kBytes));
  }
  if (bytes[0] != 0 || bytes[1] != 0) {
    fail(name, 0,
         fmt::format("magic bytes {:02x} {:02x}, expected 00 00; this is not an IDX file", bytes[0],
                     bytes[1]));
  }
  if (bytes[kIdxTypeOffset] != kIdxUnsignedBytes) {
    fail(name, kIdxTypeOffset,
         fmt::format("element type {:#04x}, expected {:#04x} (unsigned bytes)",
                     bytes[kIdxTypeOffset], kIdxUnsignedBytes));
  }
  if (bytes[3] != n_dims) {
    fail(name, 3,
         fmt::format("{} dimensions, expected {}; are images and labels swapped?", bytes[3],
                     n_dims));
  }
  Header header;
  std::size_t n_file_bytes = Header::kBytes;
  bool overflow = false;
  std::size_t n_elements = 1;
  for (std::size_t d = 0; d < n_dims; ++d) {
    const std::size_t offset = 4 + 4 * d;
    header.dims[d] = big_endian(bytes, offset);
    if (header.dims[d] == 0) fail(name, offset, "dimension 0, expected at least 1");
    overflow |= __builtin_mul_overflow(n_elements, header.dims[d], &n_elements);
  }
  overflow |= __builtin_add_overflow(n_file_bytes, n_elements, &n_file_bytes);
  if (!overflow) header.n_file_bytes = n_file_bytes;
  return header;
}

/// The header, checked against the file's length.
template <std::size_t n_dims>
IdxHeader<n_dims> parse_idx_header(Bytes bytes, const std::string& name) {
  const IdxHeader<n_dims> header = read_idx_header<n_dims>(bytes, name);
  const bool overflow = !header.n_file_bytes;
  const std::size_t expected = header.n_file_bytes.value_or(0);
  const std::string said = fmt::format("as the header says {}", fmt::join(header.dims, " x "));
  if (overflow || bytes.size() < expected) {
    fail(name, bytes.size(),
         overflow
             ? fmt::format("the file ends here, but its header says {}: this is not an image set",
                           fmt::join(header.dims, " x "))
             : fmt::format("the file ends here, expected {} bytes, {}; fetch it again", expected,
                           said));
  }
  if (bytes.size() > expected) {
    fail(name, expected, fmt::format("more bytes, expected the end of the file, {}", said));
  }
  return header;
}

/// The bytes of a file, decompressed if it is a gzip file. Offsets in errors are decompressed ones.
/// limit(first n_head bytes) returns the maximum size of a valid file; the rest of a longer file is
/// not read, because a small gzip file may decompress to more than the available memory.
template <class Limit>
std::vector<std::uint8_t> read_file(const fs::path& path, std::size_t n_head, Limit limit) {
  errno = 0;
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) {
    throw DataError(fmt::format("cannot open {}: {}, expected a file that can be read",
                                path.string(), std::strerror(errno)));
  }
  constexpr std::size_t kChunk = 1 << 20;
  std::vector<std::uint8_t> bytes;
  int n_read = 0;
  const auto read_more = [&](std::size_t n_bytes) {
    const std::size_t end = bytes.size();
    bytes.resize(end + n_bytes);
    n_read = gzread(file.get(), bytes.data() + end, static_cast<unsigned>(n_bytes));
    bytes.resize(end + static_cast<std::size_t>(std::max(n_read, 0)));
  };
  read_more(n_head);
  const std::size_t most = n_read > 0 ? limit(Bytes(bytes)) : 0;
  while (n_read > 0 && bytes.size() <= most) read_more(std::min(kChunk, most + 1 - bytes.size()));
  int status = Z_OK;
  const char* text = gzerror(file.get(), &status);
  if (status != Z_OK && status != Z_STREAM_END) {
    fail(path.string(), bytes.size(),
         fmt::format("{}, expected a whole file; fetch it again",
                     status == Z_ERRNO       ? std::strerror(errno)
                     : status == Z_BUF_ERROR ? "the gzip file ends too early"
                                             : text));
  }
  return bytes;
}

template <std::size_t n_dims>
std::vector<std::uint8_t> read_idx_file(const fs::path& path) {
  return read_file(path, IdxHeader<n_dims>::kBytes, [&](Bytes head) {
    return read_idx_header<n_dims>(head, path.string()).n_file_bytes.value_or(0);
  });
}

std::vector<std::uint8_t> read_cifar_file(const fs::path& path) {
  return read_file(path, kCifarRecord, [](Bytes) { return kMaxCifarRecords * kCifarRecord; });
}

/// Finds `stem` or `stem`.gz, or the same with the dot that some archives have before idx.
std::optional<fs::path> find_file(const fs::path& directory, const std::string& stem) {
  std::string dotted = stem;
  if (const auto at = dotted.rfind("-idx"); at != std::string::npos) dotted[at] = '.';
  for (const std::string& name : {stem, stem + ".gz", dotted, dotted + ".gz"}) {
    if (fs::exists(directory / name)) return directory / name;
  }
  return std::nullopt;
}

fs::path require_file(const fs::path& directory, const std::string& stem) {
  if (const auto path = find_file(directory, stem)) return *path;
  throw DataError(fmt::format("cannot open {}[.gz]: absent, expected beside the set's other files",
                              (directory / stem).string()));
}

void check_labels(const std::vector<std::uint8_t>& labels, std::size_t n_classes,
                  std::size_t first_offset, const std::string& name) {
  const auto wrong = std::find_if(labels.begin(), labels.end(),
                                  [&](std::uint8_t label) { return label >= n_classes; });
  if (wrong == labels.end()) return;
  fail(name, first_offset + static_cast<std::size_t>(wrong - labels.begin()),
       fmt::format("label {}, expected 0 to {}; --classes says how many classes the set has",
                   *wrong, n_classes - 1));
}

Images read_idx_pair(const fs::path& directory, const std::string& prefix, std::size_t n_classes) {
  const fs::path images_path = require_file(directory, prefix + "-images-idx3-ubyte");
  const fs::path labels_path = require_file(directory, prefix + "-labels-idx1-ubyte");
  Images images = parse_idx_images(read_idx_file<3>(images_path), images_path.string());
  const std::size_t n_images = images.pixels.size() / images.image_bytes();
  images.labels = parse_idx_labels(read_idx_file<1>(labels_path), labels_path.string());
  if (images.labels.size() != n_images) {
    fail(labels_path.string(), 4,
         fmt::format("{} labels, expected {}, one for each image of {}", images.labels.size(),
                     n_images, images_path.string()));
  }
  check_labels(images.labels, n_classes, IdxHeader<1>::kBytes, labels_path.string());
  return images;
}

/// Number of classes of an EMNIST split; labels of `letters` start at 1.
std::size_t emnist_classes(std::string_view split) {
  if (split == "byclass") return 62;
  if (split == "bymerge" || split == "balanced") return 47;
  if (split == "letters") return 27;
  return 10;  // mnist, digits
}

Dataset read_idx(const fs::path& directory, const std::string& prefix, std::string_view test_name,
                 std::size_t n_classes) {
  Dataset set;
  set.n_classes = n_classes;
  set.train = read_idx_pair(directory, prefix + "train", n_classes);
  set.test = read_idx_pair(directory, prefix + std::string(test_name), n_classes);
  if (set.train.height != set.test.height || set.train.width != set.test.width) {
    throw DataError(fmt::format(
        "cannot use {}: its test images are {} x {}, expected {} x {} as its training images",
        (directory / prefix).string(), set.test.height, set.test.width, set.train.height,
        set.train.width));
  }
  return set;
}

Dataset read_cifar10(const fs::path& directory) {
  Dataset set;
  set.n_classes = kCifarClasses;
  for (int i = 1; i <= 5; ++i) {
    const fs::path path = require_file(directory, fmt::format("data_batch_{}.bin", i));
    parse_cifar10(read_cifar_file(path), path.string(), set.train);
  }
  const fs::path path = require_file(directory, "test_batch.bin");
  parse_cifar10(read_cifar_file(path), path.string(), set.test);
  return set;
}

/// "emnist-letters" for emnist-letters-train-images-idx3-ubyte.gz, of every split in `directory`.
std::vector<std::string> emnist_splits(const fs::path& directory) {
  std::vector<std::string> splits;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    const auto end = name.find("-train-images");
    if (name.starts_with("emnist-") && end != std::string::npos) {
      splits.push_back(name.substr(0, end));
    }
  }
  std::sort(splits.begin(), splits.end());
  splits.erase(std::unique(splits.begin(), splits.end()), splits.end());
  return splits;
}

Dataset read_emnist(const fs::path& directory, const std::string& split, std::size_t n_classes) {
  const std::string_view name = std::string_view(split).substr(std::strlen("emnist-"));
  return read_idx(directory, split + "-", "test", n_classes ? n_classes : emnist_classes(name));
}

}  // namespace

Images parse_idx_images(Bytes bytes, const std::string& name) {
  using Header = IdxHeader<3>;
  const Header header = parse_idx_header<3>(bytes, name);
  Images images;
  images.channels = 1;
  images.height = header.dims[1];
  images.width = header.dims[2];
  images.pixels.assign(bytes.begin() + Header::kBytes, bytes.end());
  return images;
}

std::vector<std::uint8_t> parse_idx_labels(Bytes bytes, const std::string& name) {
  parse_idx_header<1>(bytes, name);
  return {bytes.begin() + IdxHeader<1>::kBytes, bytes.end()};
}

void parse_cifar10(Bytes bytes, const std::string& name, Images& images) {
  if (bytes.size() > kMaxCifarRecords * kCifarRecord) {
    fail(name, bytes.size(),
         fmt::format("more bytes, expected {} records of {} at most", kMaxCifarRecords,
                     kCifarRecord));
  }
  if (bytes.empty() || bytes.size() % kCifarRecord != 0) {
    fail(name, bytes.size(),
         fmt::format("the file ends here, expected whole records of {} bytes; fetch it again",
                     kCifarRecord));
  }
  images.channels = 3;
  images.height = images.width = kCifarSide;
  for (std::size_t offset = 0; offset < bytes.size(); offset += kCifarRecord) {
    const Bytes record = bytes.subspan(offset, kCifarRecord);
    if (record[0] >= kCifarClasses) {
      fail(name, offset, fmt::format("label {}, expected 0 to {}", record[0], kCifarClasses - 1));
    }
    images.labels.push_back(record[0]);
    images.pixels.insert(images.pixels.end(), record.begin() + 1, record.end());
  }
}

Dataset read_dataset(const fs::path& path, std::size_t n_classes) {
  if (!fs::is_directory(path)) {
    const std::string split = path.filename().string();
    if (split.starts_with("emnist-") && fs::is_directory(path.parent_path())) {
      return read_emnist(path.parent_path(), split, n_classes);
    }
    throw DataError(
        fmt::format("cannot open {}: expected a directory of image files, or "
                    "DIRECTORY/emnist-SPLIT",
                    path.string()));
  }
  if (find_file(path, "train-images-idx3-ubyte") || find_file(path, "train-labels-idx1-ubyte")) {
    return read_idx(path, "", "t10k", n_classes ? n_classes : 10);
  }
  if (fs::exists(path / "data_batch_1.bin") || fs::exists(path / "test_batch.bin")) {
    return read_cifar10(path);
  }
  const auto splits = emnist_splits(path);
  if (splits.size() == 1) return read_emnist(path, splits.front(), n_classes);
  if (splits.size() > 1) {
    throw DataError(fmt::format("cannot choose in {}: it holds {}, expected one; give {}",
                                path.string(), fmt::join(splits, ", "),
                                (path / splits.front()).string()));
  }
  throw DataError(
      fmt::format("cannot find images in {}: expected train-images-idx3-ubyte[.gz] "
                  "and the rest of MNIST's or EMNIST's files, or CIFAR-10's "
                  "data_batch_1.bin and the rest",
                  path.string()));
}

}  // namespace train
