#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace lockstep::base {

/// Which CPU this is, as far as its speeds depend on it.
struct CpuModel {
  std::array<char, 13> vendor{};  ///< as the CPU says, "GenuineIntel"; empty: unknown
  unsigned family = 0;
  unsigned model = 0;
  std::size_t l2_bytes = 0;  ///< of one core; 0: unknown

  std::string_view vendor_name() const noexcept { return vendor.data(); }
};

/// The calling thread's. On other CPUs than x86-64 only its cache is known.
CpuModel cpu_model() noexcept;

}  // namespace lockstep::base
