#include "kernels/isa.hpp"

#include <cstdlib>

namespace lockstep::kernels {
namespace {

Isa choose() {
  Isa cap = Isa::avx512;
  if (const char* text = std::getenv("LOCKSTEP_SIMD")) {
    for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
      if (text == name_of(isa)) cap = isa;
    }
  }
  for (const Isa isa : {Isa::avx512, Isa::avx2}) {
    if (isa <= cap && is_supported(isa)) return isa;
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

}  // namespace

const bool use_write_prefetch = !is_amd();

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
    case Isa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
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

Isa chosen_isa() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace lockstep::kernels
