#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

/// A number for the layout of a struct that other processes map or read: it changes with the name,
/// order, offset and size of any member.
namespace lockstep::base {

struct Field {
  std::string_view name;
  std::size_t offset;
  std::size_t n_bytes;
  std::size_t alignment;
};

#define LOCKSTEP_FIELD(type, member)                                                       \
  lockstep::base::Field {                                                                  \
#member, offsetof(type, member), sizeof(type::member), alignof(decltype(type::member)) \
  }

/// FNV-1a, which several layouts are added to.
class LayoutHash {
 public:
  /// All members of T, in order. Does not compile if the fields leave room for another member.
  template <class T>
  constexpr LayoutHash& add(std::initializer_list<Field> fields) {
    constexpr std::size_t kWidestAlignment = 128;  // of a member that has an alignas of its own
    std::size_t end = 0;
    for (const Field& field : fields) {
      const std::size_t gap = field.offset - end;
      if (field.offset < end) throw "the fields are not in the order of the members";
      if (gap >= (field.offset % kWidestAlignment == 0 ? kWidestAlignment : field.alignment)) {
        throw "a member is missing before this field";
      }
      add(field.name);
      add(field.offset);
      add(field.n_bytes);
      end = field.offset + field.n_bytes;
    }
    if (sizeof(T) - end >= alignof(T)) throw "a member is missing after the last field";
    return add(sizeof(T));
  }
  constexpr LayoutHash& add(std::size_t number) {
    for (int i = 0; i < 8; ++i) add_byte(static_cast<std::uint8_t>(number >> (8 * i)));
    return *this;
  }
  constexpr std::uint32_t value() const {
    return static_cast<std::uint32_t>(hash_ ^ (hash_ >> 32U));
  }

 private:
  constexpr void add(std::string_view text) {
    for (const char letter : text) add_byte(static_cast<std::uint8_t>(letter));
    add_byte(0);
  }
  constexpr void add_byte(std::uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3U; }

  std::uint64_t hash_ = 0xcbf29ce484222325U;
};

}  // namespace lockstep::base
