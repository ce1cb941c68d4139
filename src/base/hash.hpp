#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lockstep::base {

/// Detects differences and damage, not malicious changes: four lanes of multiplications, at about
/// memory bandwidth. Each step is a bijection, so any change of a single word is detected. Files
/// have it.
inline std::uint64_t hash_of_bytes(const void* data, std::size_t n_bytes) {
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15ULL;
  const auto mix = [](std::uint64_t hash, std::uint64_t word) {
    hash = (hash ^ word) * kFactor;
    return hash ^ (hash >> 29U);
  };
  const auto* next = static_cast<const unsigned char*>(data);
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  std::size_t left = n_bytes;
  for (; left >= 32; left -= 32, next += 32) {
    std::array<std::uint64_t, 4> words{};
    std::memcpy(words.data(), next, 32);
    for (std::size_t i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::array<std::uint64_t, 4> rest{};
  if (left > 0) std::memcpy(rest.data(), next, left);
  std::uint64_t hash = n_bytes;
  for (std::size_t i = 0; i < 4; ++i) hash = mix(mix(hash, lanes[i]), rest[i]);
  return hash;
}

}  // namespace lockstep::base
