#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <lockstep/engine.hpp>
#include <span>
#include <string>
#include <type_traits>

#include "group/check.hpp"

namespace lockstep::message {

/// What ranks compare before they take any data.
struct Header {
  std::uint8_t op;
  std::uint8_t step;  ///< the operation that it makes here
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::int32_t root;
  std::uint64_t count;
  std::uint64_t counts;  ///< a hash of all_gather's and gather's
  std::int32_t color;    ///< of split
  std::int32_t key;
  std::uint32_t line;
  internal::Check check;      ///< how much this rank compares
  std::array<char, 27> file;  ///< its name's end, and a null
};
static_assert(sizeof(Header) == 64);
static_assert(std::is_trivially_copyable_v<Header>);

/// The first message of a call. Its length is the same whatever the call, so that ranks that make
/// different calls can read each other; data that fits is_eager in it, and no other message
/// follows.
struct alignas(64) First {
  Header header;
  std::array<std::byte, 64> payload;
};
static_assert(sizeof(First) == 128);

/// Makes headers of this rank's calls.
class HeaderMaker {
 public:
  /// Of `call`, or of the one that it is a step of.
  Header of(const Call& step, int color = 0, int key = 0);
  internal::Check check() const noexcept { return check_; }

 private:
  const char* path_ = nullptr;   // of the last call's file
  std::array<char, 27> file_{};  // the end of its name
  internal::Check check_ = internal::check_level();
};

/// Where not all of it is the same bytes.
bool agree_in_what_counts(const Header& a, const Header& b, bool compares_sites);
inline bool agree(const Header& a, const Header& b, bool compares_sites) {
  return (std::memcmp(&a, &b, offsetof(Header, color)) == 0 && a.check == b.check &&
          !compares_sites) ||
         agree_in_what_counts(a, b, compares_sites);
}

struct Row {
  int rank;
  Header header;
};
/// Text of the MismatchError of ranks that do not agree.
std::string difference_of(std::span<const Row> rows);

}  // namespace lockstep::message
