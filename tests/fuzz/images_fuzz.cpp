// Whatever stands in a file of images or labels, reading it returns what the file holds or throws a
// DataError.

#include <cstdint>
#include <cstdlib>
#include <span>

#include "train/data.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

template <class F>
void try_parsing(F parse) {
  try {
    parse();
  } catch (const train::DataError&) {
  }
}

}  // namespace

/// The first byte chooses the format. CIFAR gets the rest repeated, so that small inputs make whole
/// records.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span bytes(data + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      try_parsing([&] {
        const train::Images images = train::parse_idx_images(bytes, "images");
        require(images.image_bytes() > 0 && images.pixels.size() % images.image_bytes() == 0);
        require(images.pixels.size() < bytes.size());
      });
      break;
    case 1:
      try_parsing([&] { require(train::parse_idx_labels(bytes, "labels").size() < bytes.size()); });
      break;
    case 2:
      try_parsing([&] {
        std::vector<std::uint8_t> records;
        for (int i = 0; i < 16; ++i) records.insert(records.end(), bytes.begin(), bytes.end());
        train::Images images;
        train::parse_cifar10(records, "records", images);
        require(images.pixels.size() == images.size() * images.image_bytes());
      });
      break;
  }
  return 0;
}
