#pragma once

#include <cstddef>
#include <string_view>

namespace lockstep::kernels {

/// Instruction sets with a compiled body. `scalar` is the compiler's baseline: SSE2 on x86-64, NEON
/// on arm64.
enum class Isa { scalar, avx2, avx512 };

std::string_view name_of(Isa isa);

/// Whether this build has a body for `isa` and this CPU supports it.
bool is_supported(Isa isa);

/// Limits the choice to this one; has no effect after the first use of a kernel. Threads: any.
void limit_isa(Isa widest);

/// The widest supported one within the limit; chosen once.
Isa chosen_isa();

/// How to use this CPU's caches. Initialised before all globals whose constructors may use kernels.
struct Caches {
  /// Whether kernels that read and write prefetch their lines for write. Measured for batch norm: a
  /// gain on Intel's Skylake servers, a loss of 10 to 25 % on AMD's (docs/design, 018).
  bool use_write_prefetch;
  /// What a thread writes in a pass over more bytes than this is better streamed past the caches: a
  /// quarter of the third level on AMD, where several ranks share it and where this is the
  /// alternative to prefetch for write; elsewhere never.
  std::size_t streaming_bytes;
  /// What a thread reads again should be at most this: the second-level cache or, on AMD, an eighth
  /// of the third level, which up to eight cores share and which streams as fast.
  std::size_t reuse_bytes;
};
extern const Caches kCaches;

}  // namespace lockstep::kernels
