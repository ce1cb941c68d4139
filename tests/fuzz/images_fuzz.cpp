// Whatever stands in a file of images or labels, reading it returns what the file holds or throws a
// DataError.

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "train/data.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

/// The first byte chooses between images and labels.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static const int file = memfd_create("images", MFD_CLOEXEC);
  static const std::string path = fmt::format("/proc/self/fd/{}", file);
  const std::size_t n_bytes = size - 1;
  require(ftruncate(file, 0) == 0);
  require(pwrite(file, data + 1, n_bytes, 0) == static_cast<ssize_t>(n_bytes));
  try {
    const train::Idx idx = train::read_idx(path, data[0] % 2 == 0 ? 3 : 1);
    std::size_t n_values = 1;
    for (const std::size_t of_dim : idx.sizes) n_values *= of_dim;
    require(n_values > 0 && idx.bytes.size() == n_values);
  } catch (const train::DataError&) {
  }
  return 0;
}
