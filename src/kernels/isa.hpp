#pragma once

#include <string_view>

namespace lockstep::kernels {

/// The instruction sets the bodies are compiled for. `scalar` is the compiler's baseline: SSE2 on
/// x86-64, NEON on arm64.
enum class Isa { scalar, avx2, avx512 };

std::string_view name_of(Isa isa);

/// Whether this build has bodies for `isa` and this CPU can run them.
bool is_supported(Isa isa);

/// The widest supported one, capped by LOCKSTEP_SIMD; chosen once. A value of LOCKSTEP_SIMD that
/// names none caps nothing here: Env::read refuses it with a UsageError.
Isa chosen_isa();

/// Whether a walk that reads and writes asks for its lines ahead. Measured for batch normalisation:
/// a gain on Intel's Skylake servers, a loss of 10 to 25 % on AMD's (docs/performance.md).
extern const bool use_write_prefetch;

}  // namespace lockstep::kernels
