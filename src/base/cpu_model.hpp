#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace lockstep::base {

/// The CPU model, as far as it determines speed.
struct CpuModel {
  std::array<char, 13> vendor{};  ///< as the CPU reports it, "GenuineIntel"; empty: unknown
  unsigned family = 0;
  unsigned model = 0;
  std::size_t l2_bytes = 0;  ///< per core; 0: unknown

  std::string_view vendor_name() const noexcept { return vendor.data(); }
};

/// The calling thread's CPU. On CPUs other than x86-64 only l2_bytes is known.
CpuModel cpu_model() noexcept;

}  // namespace lockstep::base
