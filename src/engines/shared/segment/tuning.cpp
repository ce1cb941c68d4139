#include "engines/shared/segment/tuning.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <lockstep/error.hpp>
#include <string_view>

#include "base/number.hpp"
#include "engines/shared/segment/layout.hpp"

namespace lockstep::shared {
namespace {

constexpr std::uint64_t kKiB = 1024;

/// What suits a CPU best, by `lockstep bench --tune`.
struct CacheRule {
  std::uint64_t pair_inline_bytes;  ///< for 2 ranks
  std::uint64_t chunk_bytes;
  std::uint64_t flat_bytes_in_all;    ///< divided by the number of ranks, which share cores
  std::uint64_t pair_in_place_bytes;  ///< for 2 ranks
  std::uint64_t in_place_bytes;       ///< for more ranks
};

/// Cores share a third level that is nearly as fast as the second, so large chunks cost nothing and
/// need fewer phases. The same on Zen 3 and Zen 4, whose second levels have 512 KiB and 1 MiB.
constexpr CacheRule kFastThirdLevel{kInlineBytes, 256 * kKiB, 128 * kKiB, 2 * kKiB, 16 * kKiB};

/// The third level is far slower than the second, so the four pieces that a rank uses at once
/// (input, slot, peer's slot, result) take at most a quarter of the second: 64 KiB on Skylake-SP to
/// Cooper Lake.
CacheRule fits_second_level(std::size_t l2_bytes) {
  CacheRule rule{kFirstLineBytes, 64 * kKiB, 256 * kKiB, 8 * kKiB, 8 * kKiB};
  if (l2_bytes != 0) {
    rule.chunk_bytes =
        std::clamp<std::uint64_t>(l2_bytes / 16 / 4096 * 4096, 16 * kKiB, rule.chunk_bytes);
  }
  return rule;
}

/// By vendor, because a virtual machine does not report the third level reliably.
CacheRule rule_for(const base::CpuModel& cpu) {
  constexpr unsigned kZen = 0x17;  // and later families
  const bool is_zen = cpu.vendor_name() == "AuthenticAMD" && cpu.family >= kZen;
  return is_zen ? kFastThirdLevel : fits_second_level(cpu.l2_bytes);
}

/// For ranks with a core each. A rank then waits longer for the other ranks' lines than for a
/// phase: the size up to which flat is faster falls with the cube of the number of ranks (measured
/// on Emerald Rapids: some 48 KiB of 3 ranks, 16 KiB of 4, 1.5 KiB of 8, 0.6 KiB of 16).
std::uint64_t flat_bytes_on_cores(std::uint64_t n_ranks) {
  return std::max<std::uint64_t>(1'000'000 / (n_ranks * n_ranks * n_ranks), 512);
}

}  // namespace

Tuning default_tuning(int n_ranks, const base::CpuModel& cpu) {
  const CacheRule rule = rule_for(cpu);
  Tuning tuning{};
  tuning.inline_bytes = n_ranks == 2 ? rule.pair_inline_bytes : kInlineBytes;
  if (n_ranks == 2) {
    // They read the same amount either way, and flat needs one phase instead of two.
    tuning.flat_bytes = tuning.flat_bytes_oversubscribed =
        std::numeric_limits<std::uint64_t>::max();
  } else {
    const auto n = static_cast<std::uint64_t>(n_ranks);
    tuning.flat_bytes_oversubscribed = rule.flat_bytes_in_all / n;
    tuning.flat_bytes = std::min(tuning.flat_bytes_oversubscribed, flat_bytes_on_cores(n));
  }
  tuning.chunk_bytes = rule.chunk_bytes;
  tuning.in_place_bytes = n_ranks == 2 ? rule.pair_in_place_bytes : rule.in_place_bytes;
  return tuning;
}

TuningOverrides parse_tuning(const std::optional<std::string>& text) {
  TuningOverrides tuning;
  const auto reject = [&](std::string_view item) {
    throw UsageError(
        {.operation = "init_dist"},
        fmt::format(
            "LOCKSTEP_TUNE has '{}'; it takes inline=BYTES (at most {}), "
            "flat=BYTES, chunk=BYTES (4096 and more) and inplace=BYTES, with commas between "
            "(docs/performance.md)",
            item, kInlineBytes));
  };
  std::string_view rest = text ? std::string_view(*text) : std::string_view();
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::size_t equals = std::min(item.find('='), item.size());
    const std::string_view name = item.substr(0, equals);
    const std::string_view value = item.substr(std::min(equals + 1, item.size()));
    const auto n_bytes = base::parse_number<std::uint64_t>(value);
    if (name == "inline" && n_bytes && *n_bytes <= kInlineBytes) {
      tuning.inline_bytes = *n_bytes;
    } else if (name == "flat" && n_bytes) {
      tuning.flat_bytes = *n_bytes;
    } else if (name == "chunk" && n_bytes >= 4096U) {
      tuning.chunk_bytes = *n_bytes / 4096 * 4096;  // whole elements and lines
    } else if (name == "inplace" && n_bytes) {
      tuning.in_place_bytes = *n_bytes;
    } else {
      reject(item);
    }
  }
  return tuning;
}

Tuning tuning_for(int n_ranks, const TuningOverrides& overrides) {
  const Tuning defaults = default_tuning(n_ranks, base::cpu_model());
  return {.inline_bytes = overrides.inline_bytes.value_or(defaults.inline_bytes),
          .flat_bytes = overrides.flat_bytes.value_or(defaults.flat_bytes),
          .flat_bytes_oversubscribed =
              overrides.flat_bytes.value_or(defaults.flat_bytes_oversubscribed),
          .chunk_bytes = overrides.chunk_bytes.value_or(defaults.chunk_bytes),
          .in_place_bytes = overrides.in_place_bytes.value_or(defaults.in_place_bytes)};
}

}  // namespace lockstep::shared
