#pragma once

#include <string_view>

namespace lockstep::kernels {

/// Instruction sets with a compiled body. `scalar` is the compiler's baseline: SSE2 on x86-64, NEON
/// on arm64.
enum class Isa { scalar, avx2, avx512 };

std::string_view name_of(Isa isa);

/// Whether this build has a body for `isa` and this CPU supports it.
bool is_supported(Isa isa);

/// The widest supported one, capped by LOCKSTEP_SIMD; chosen once. An unknown value of
/// LOCKSTEP_SIMD is ignored here: Env::read rejects it with a UsageError.
Isa chosen_isa();

/// Whether kernels that read and write prefetch their lines for write. Measured for batch norm:
/// a gain on Intel's Skylake servers, a loss of 10 to 25 % on AMD's (docs/performance.md).
extern const bool use_write_prefetch;

}  // namespace lockstep::kernels
