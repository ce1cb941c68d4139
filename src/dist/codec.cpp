#include <fmt/format.h>

#include <lockstep/detail/codec.hpp>
#include <new>

#include "base/hash.hpp"

namespace lockstep::detail {

void Bytes::grow(std::size_t n_bytes) {
  const std::size_t capacity = std::max(n_bytes, capacity_ + capacity_ / 2);
  // realloc remaps the pages of a large block instead of copying them.
  void* const moved = std::realloc(data_.get(), capacity);
  if (moved == nullptr) throw std::bad_alloc();
  (void)data_.release();
  data_.reset(static_cast<std::byte*>(moved));
  capacity_ = capacity;
}

// --- Writer -------------------------------------------------------------------------------------

void Writer::write_size(std::uint64_t n_elements) {
  write(&n_elements, sizeof n_elements);
  needed_ = std::max(needed_, out_.size() + static_cast<std::size_t>(n_elements));
}

void Writer::enter() {
  if (++depth_ > kMaxDepth) throw_too_deep();
}

void Writer::finish() {
  const std::size_t end = out_.size();
  const std::uint64_t n_padding = needed_ > end ? needed_ - end : 0;
  out_.resize(end + n_padding);
  if (n_padding > 0) std::memset(out_.data() + end, 0, n_padding);
  write(&n_padding, sizeof n_padding);
}

// --- Reader -------------------------------------------------------------------------------------

Reader::Reader(std::span<const std::byte> bytes) : InputArchive(this) {
  if (bytes.size() < sizeof n_padding_) throw_truncated();
  left_ = bytes.first(bytes.size() - sizeof n_padding_);
  std::memcpy(&n_padding_, left_.data() + left_.size(), sizeof n_padding_);
}

std::uint64_t Reader::read_size() {
  std::uint64_t n_elements = 0;
  read(&n_elements, sizeof n_elements);
  if (n_elements > left_.size()) {
    throw DecodeError(fmt::format("a container claims {} elements, and {} bytes are left",
                                  n_elements, left_.size()));
  }
  return n_elements;
}

bool Reader::read_bool() {
  std::uint8_t byte = 0;
  read(&byte, sizeof byte);
  if (byte > 1) throw DecodeError(fmt::format("a bool is {}", byte));
  return byte == 1;
}

void Reader::enter() {
  if (++depth_ > kMaxDepth) {
    throw DecodeError(fmt::format("it nests deeper than {} levels", kMaxDepth));
  }
}

void Reader::finish() const {
  if (left_.size() != n_padding_) {
    throw DecodeError(fmt::format("{} bytes are left over, expected {}", left_.size(), n_padding_));
  }
}

void Reader::throw_truncated() { throw DecodeError("it ends too early"); }

// --- messages -----------------------------------------------------------------------------------

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  return base::hash_of_bytes(bytes.data(), bytes.size());
}

std::uint64_t fingerprint(const std::type_info& type) noexcept {
  return checksum(std::as_bytes(std::span(type.name(), std::strlen(type.name()))));
}

MessageHeader seal(MessageHeader header, std::span<const std::byte> bytes) noexcept {
  header.n_bytes = bytes.size();
  header.checksum = checksum(bytes);
  return header;
}

std::string defect_of(const MessageHeader& header, std::span<const std::byte> bytes) {
  if (header.magic != MessageHeader::kMagic) {
    return fmt::format("is not a serialised object (it begins with {:08x})", header.magic);
  }
  if (header.version != MessageHeader::kVersion) {
    return fmt::format(
        "has version {} and this program reads version {}; run the same lockstep on "
        "all ranks",
        header.version, MessageHeader::kVersion);
  }
  if (header.n_bytes != bytes.size()) {
    return fmt::format("has {} bytes where its header says {}", bytes.size(), header.n_bytes);
  }
  if (header.checksum != checksum(bytes)) return "is damaged: its checksum is wrong";
  return {};
}

}  // namespace lockstep::detail
