#pragma once

// Serialisation for objects.hpp: cereal archives that validate every length a peer sends.

#include <bit>
#include <cereal/cereal.hpp>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeinfo>

#include <lockstep/types.hpp>

namespace lockstep::detail {

static_assert(std::endian::native == std::endian::little, "messages are little-endian");

/// A byte buffer that grows without zeroing, and if large, without copying.
class Bytes {
 public:
  Bytes() = default;
  explicit Bytes(std::size_t n_bytes) { resize(n_bytes); }

  std::byte* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  std::span<const std::byte> span() const noexcept { return {data_.get(), size_}; }
  void clear() noexcept { size_ = 0; }
  /// New bytes are not initialised.
  void resize(std::size_t n_bytes) {
    if (n_bytes > capacity_) grow(n_bytes);
    size_ = n_bytes;
  }
  void append(const void* data, std::size_t n_bytes) {
    if (n_bytes == 0) return;
    if (n_bytes > capacity_ - size_) grow(size_ + n_bytes);
    std::memcpy(data_.get() + size_, data, n_bytes);
    size_ += n_bytes;
  }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept { std::free(data); }
  };
  void grow(std::size_t n_bytes);

  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// The bytes are not those of an object of the type that is read.
class DecodeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Maximum nesting depth of objects: more could overflow the stack of the rank that decodes them.
inline constexpr int kMaxDepth = 2000;
[[noreturn]] void throw_too_deep();  // UsageError

/// Writes objects in the format of cereal's portable binary archive, always little-endian. Pads
/// the end, so that no container has a size greater than the number of bytes that follow it.
class Writer final : public cereal::OutputArchive<Writer, cereal::AllowEmptyClassElision> {
 public:
  explicit Writer(Bytes& out) : OutputArchive(this), out_(out) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void write(const void* data, std::size_t n_bytes) { out_.append(data, n_bytes); }
  void write_size(std::uint64_t n_elements);
  void enter();
  void leave() noexcept { --depth_; }
  /// Call once, last.
  void finish();

 private:
  Bytes& out_;
  std::size_t needed_ = 0;  // size that out_ must reach
  int depth_ = 0;
};

/// Reads what a Writer wrote; throws DecodeError if the bytes are not valid.
class Reader final : public cereal::InputArchive<Reader, cereal::AllowEmptyClassElision> {
 public:
  explicit Reader(std::span<const std::byte> bytes);
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void read(void* data, std::size_t n_bytes) {
    if (n_bytes > left_.size()) throw_truncated();
    if (n_bytes == 0) return;
    std::memcpy(data, left_.data(), n_bytes);
    left_ = left_.subspan(n_bytes);
  }
  std::uint64_t read_size();
  bool read_bool();
  void enter();
  void leave() noexcept { --depth_; }
  /// Call once, last. Throws unless exactly the padding is left.
  void finish() const;

 private:
  [[noreturn]] static void throw_truncated();

  std::span<const std::byte> left_;
  std::size_t n_padding_ = 0;
  int depth_ = 0;
};

// --- what cereal finds by the archives' namespace -----------------------------------------------

template <class T>
concept Number = std::is_arithmetic_v<T>;

template <Number T>
void CEREAL_SAVE_FUNCTION_NAME(Writer& out, const T& value) {
  out.write(std::addressof(value), sizeof value);
}
template <Number T>
void CEREAL_LOAD_FUNCTION_NAME(Reader& in, T& value) {
  if constexpr (std::same_as<T, bool>) {
    value = in.read_bool();
  } else {
    in.read(std::addressof(value), sizeof value);
  }
}

template <class T>
void CEREAL_SAVE_FUNCTION_NAME(Writer& out, const cereal::BinaryData<T>& data) {
  out.write(data.data, static_cast<std::size_t>(data.size));
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(Reader& in, cereal::BinaryData<T>& data) {
  in.read(data.data, static_cast<std::size_t>(data.size));
}

template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(Writer& out, cereal::SizeTag<T>& tag) {
  out.write_size(tag.size);
}
template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(Reader& in, cereal::SizeTag<T>& tag) {
  tag.size = in.read_size();
}

template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(Writer& out, cereal::NameValuePair<T>& pair) {
  out(pair.value);
}
template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(Reader& in, cereal::NameValuePair<T>& pair) {
  in(pair.value);
}

template <class T>
requires(!Number<T>) void prologue(Writer& out, const T&) { out.enter(); }
template <class T>
requires(!Number<T>) void epilogue(Writer& out, const T&) { out.leave(); }
template <class T>
requires(!Number<T>) void prologue(Reader& in, const T&) { in.enter(); }
template <class T>
requires(!Number<T>) void epilogue(Reader& in, const T&) { in.leave(); }

template <class T>
concept SmallFloat = std::same_as<T, Float16> || std::same_as<T, BFloat16>;
template <SmallFloat T>
void CEREAL_SAVE_FUNCTION_NAME(Writer& out, const T& value) {
  out(value.bits);
}
template <SmallFloat T>
void CEREAL_LOAD_FUNCTION_NAME(Reader& in, T& value) {
  in(value.bits);
}

// Templates, because every type converts to json implicitly.
template <class T>
concept Json = std::same_as<T, nlohmann::json>;
void save_json(Writer& out, const nlohmann::json& value);
void load_json(Reader& in, nlohmann::json& value);
template <Json T>
void CEREAL_SAVE_FUNCTION_NAME(Writer& out, const T& value) {
  save_json(out, value);
}
template <Json T>
void CEREAL_LOAD_FUNCTION_NAME(Reader& in, T& value) {
  load_json(in, value);
}

// --- messages -----------------------------------------------------------------------------------

enum class ObjectOp : std::uint8_t {
  all_gather_object,
  gather_object,
  broadcast_object,
  broadcast_object_list,
  collect_results,
  all_reduce_dict,
};

/// Precedes the bytes of every message and describes them.
struct MessageHeader {
  static constexpr std::uint32_t kMagic = 0x6f4b534c;  // "LSKo"
  static constexpr std::uint16_t kVersion = 2;

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  ObjectOp op = ObjectOp::all_gather_object;
  std::uint8_t failed = 0;     ///< the bytes are the text of the sender's exception
  std::int64_t root = -1;      ///< src or dst
  std::uint64_t type = 0;      ///< fingerprint of the objects' type
  std::uint64_t agreed = 0;    ///< must be equal on all ranks: length of a list, size
  std::uint64_t n_items = 0;   ///< number of objects in the bytes, or in this rank's part
  std::uint64_t n_bytes = 0;   ///< number of bytes that follow
  std::uint64_t checksum = 0;  ///< of those bytes
};
static_assert(sizeof(MessageHeader) == 56 && std::is_trivially_copyable_v<MessageHeader>);

/// Equal for equal type names, with every compiler that uses the Itanium ABI.
std::uint64_t fingerprint(const std::type_info& type) noexcept;
std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;
/// Sets n_bytes and checksum in the header.
MessageHeader seal(MessageHeader header, std::span<const std::byte> bytes) noexcept;
/// Describes the defect of the message; empty if it has none.
std::string defect_of(const MessageHeader& header, std::span<const std::byte> bytes);

template <class T>
void encode(Bytes& out, const T& object) {
  Writer writer(out);
  writer(object);
  writer.finish();
}

template <class T>
void decode(std::span<const std::byte> bytes, T& object) {
  Reader reader(bytes);
  reader(object);
  reader.finish();
}

}  // namespace lockstep::detail

CEREAL_REGISTER_ARCHIVE(lockstep::detail::Writer)
CEREAL_REGISTER_ARCHIVE(lockstep::detail::Reader)
CEREAL_SETUP_ARCHIVE_TRAITS(lockstep::detail::Reader, lockstep::detail::Writer)
