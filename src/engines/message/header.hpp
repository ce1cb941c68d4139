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
#include "group/failure.hpp"

namespace lockstep::message {

/// What ranks compare before they accept data.
struct Header {
  std::uint8_t op;
  std::uint8_t step;  ///< the operation that it performs here
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::int32_t root;
  std::uint64_t count;
  std::uint64_t counts;     ///< hash of the counts of all_gather and gather
  std::uint32_t n_refused;  ///< see Call::n_refused
  std::uint32_t line;
  Check check;                ///< how much this rank compares
  std::array<char, 31> file;  ///< the end of its name, null-terminated
};
static_assert(sizeof(Header) == 64);
static_assert(std::is_trivially_copyable_v<Header>);

/// The first message of a call over a transport that takes no message shorter than its receive
/// (EagerMessages has the others). It has the same length for every call, so that ranks that make
/// different calls can parse each other's. Data that fits is sent eagerly in it, and no other
/// message follows.
struct alignas(64) EagerMessage {
  Header header;
  std::array<std::byte, 64> payload;
};
static_assert(sizeof(EagerMessage) == 128);

/// Makes headers of this rank's calls.
class HeaderMaker {
 public:
  /// The header of `step`, or of the call of which it is a step.
  Header of(const Call& step);

 private:
  const char* path_ = nullptr;   // file of the last call
  std::array<char, 31> file_{};  // the end of its name
};

/// Used if the headers are not bytewise equal.
bool same_compared_fields(const Header& a, const Header& b, bool compares_sites);
inline bool same_signature(const Header& a, const Header& b, bool compares_sites) {
  return (std::memcmp(&a, &b, offsetof(Header, line)) == 0 && a.check == b.check &&
          !compares_sites) ||
         same_compared_fields(a, b, compares_sites);
}

struct Row {
  int rank;
  Header header;
};
struct RefusedCall {
  int rank;
  std::string text;
};
/// The MismatchError of ranks that disagree; `refused`: the calls that some of them refused.
internal::Failure mismatch_failure(const Call& call, std::span<const Row> rows,
                                   std::span<const RefusedCall> refused);

}  // namespace lockstep::message
