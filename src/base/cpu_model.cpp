#include "base/cpu_model.hpp"

#include <unistd.h>

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep::base {

CpuModel cpu_model() noexcept {
  CpuModel cpu;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
    std::memcpy(cpu.vendor.data(), &b, 4);
    std::memcpy(cpu.vendor.data() + 4, &d, 4);
    std::memcpy(cpu.vendor.data() + 8, &c, 4);
  }
  if (__get_cpuid(1, &a, &b, &c, &d) != 0) {
    cpu.family = a >> 8U & 0xfU;
    cpu.model = a >> 4U & 0xfU;
    if (cpu.family == 0x6 || cpu.family == 0xf) cpu.model |= a >> 12U & 0xf0U;
    if (cpu.family == 0xf) cpu.family += a >> 20U & 0xffU;
  }
#endif
  const long l2_bytes = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l2_bytes > 0) cpu.l2_bytes = static_cast<std::size_t>(l2_bytes);
  return cpu;
}

}  // namespace lockstep::base
