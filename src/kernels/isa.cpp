#include "kernels/isa.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep::kernels {
namespace {

constinit std::atomic<Isa> limit = Isa::avx512;

Isa choose() {
  for (const Isa isa : {Isa::avx512, Isa::avx2}) {
    if (isa <= limit && is_supported(isa)) return isa;
  }
  return Isa::scalar;
}

bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

#if defined(__x86_64__)
/// clang 16 does not know it in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a = 0, b = 0, features = 0, d = 0;
  return __get_cpuid(1, &a, &b, &features, &d) != 0 && (features & bit_F16C) != 0;
}
#endif

std::size_t second_level_bytes() {
  return static_cast<std::size_t>(std::max<long>(::sysconf(_SC_LEVEL2_CACHE_SIZE), 512 << 10));
}

/// Of the one that a core uses: sysconf's is the sum over a package. AMD's only.
std::size_t third_level_bytes() {
#if defined(__x86_64__)
  unsigned type = 0;
  unsigned geometry = 0;
  unsigned sets = 0;
  unsigned flags = 0;
  if (__get_cpuid_count(0x8000001D, 3, &type, &geometry, &sets, &flags) != 0 && (type & 31U) != 0) {
    const std::size_t ways = (geometry >> 22U) + 1;
    const std::size_t partitions = (geometry >> 12U & 0x3ffU) + 1;
    const std::size_t line_bytes = (geometry & 0xfffU) + 1;
    return ways * partitions * line_bytes * (std::size_t{sets} + 1);
  }
#endif
  return std::size_t{16} << 20U;
}

}  // namespace

[[gnu::init_priority(101)]] const Caches kCaches{
    .use_write_prefetch = !is_amd(),
    .streaming_bytes = is_amd() ? third_level_bytes() / 4 : std::numeric_limits<std::size_t>::max(),
    .reuse_bytes = std::max(second_level_bytes(), is_amd() ? third_level_bytes() / 8 : 0)};

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::scalar: return "scalar";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
  }
  return "?";
}

bool is_supported(Isa isa) {
  switch (isa) {
    case Isa::scalar: return true;
#if defined(__x86_64__)
    case Isa::avx2: return __builtin_cpu_supports("avx2") && has_f16c();
    case Isa::avx512:
      return is_supported(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#else
    case Isa::avx2:
    case Isa::avx512: return false;
#endif
  }
  return false;
}

void limit_isa(Isa widest) { limit = widest; }

Isa chosen_isa() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace lockstep::kernels
