#pragma once

#include <algorithm>
#include <array>
#include <exception>
#include <lockstep/error.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep::nn::detail {

/// What an exception of a c10d backend or store says. Its text tells: not all libtorches have
/// headers of Gloo's classes, NCCL and UCC have one for all, and a process group of Python has its
/// own.
struct C10dError {
  enum class Kind { peer_lost, timeout, other };
  Kind kind;
  std::string text;  // without the C++ stack that libtorch may append

  std::string first_line() const { return text.substr(0, text.find('\n')); }
};

inline C10dError c10d_error(const std::exception& error) {
  using Kind = C10dError::Kind;
  std::string text = error.what();
  text = text.substr(0, text.find("\nException raised from"));
  const auto holds = [&text](std::string_view sign) {
    return text.find(sign) != std::string::npos;
  };
  constexpr std::array<std::string_view, 5> kLost = {
      "closed by peer", "reset by peer", "Broken pipe", "Socket closed", "Connection refused"};
  constexpr std::array<std::string_view, 5> kLate = {"Timed out", "timed out", "timeout", "Timeout",
                                                     "monitoredBarrier"};
  Kind kind = Kind::other;
  if (std::ranges::any_of(kLost, holds)) {
    kind = Kind::peer_lost;
  } else if (std::ranges::any_of(kLate, holds)) {
    kind = Kind::timeout;
  }
  return {.kind = kind, .text = std::move(text)};
}

/// Throws lockstep's error of that kind.
[[noreturn]] inline void throw_error(C10dError::Kind kind, const ErrorContext& context,
                                     std::string text) {
  using Kind = C10dError::Kind;
  switch (kind) {
    case Kind::peer_lost: throw PeerLost(context, std::move(text));
    case Kind::timeout: throw TimeoutError(context, std::move(text));
    case Kind::other: break;
  }
  throw EngineError(context, std::move(text));
}

[[noreturn]] inline void throw_store_error(const ErrorContext& context,
                                           const std::exception& error) {
  throw EngineError(context, "the store failed: " + c10d_error(error).text);
}

}  // namespace lockstep::nn::detail
