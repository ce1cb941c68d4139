#include "engines/shared/tuning.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <lockstep/error.hpp>
#include <string_view>

namespace lockstep::shared {
namespace {

Tuning measured(int n_ranks) {
  Tuning tuning{};
  // Two ranks read the same from each other either way, and flat has one phase for two.
  tuning.flat_bytes = n_ranks == 2 ? std::numeric_limits<std::uint64_t>::max()
                                   : (256U << 10U) / static_cast<std::uint64_t>(n_ranks);
  tuning.chunk_bytes = n_ranks == 2 ? 64U << 10U : 256U << 10U;
  tuning.in_place_bytes = 8U << 10U;
  return tuning;
}

}  // namespace

Tuning tuning_for(int n_ranks, const std::optional<std::string>& variable) {
  Tuning tuning = measured(n_ranks);
  const auto refuse = [&](std::string_view item) {
    throw UsageError({.operation = "init_dist"},
                     fmt::format("LOCKSTEP_TUNE has '{}'; it takes flat=BYTES, chunk=BYTES (4096 "
                                 "and more) and inplace=BYTES, with commas between "
                                 "(docs/performance.md)",
                                 item));
  };
  std::string_view rest = variable ? std::string_view(*variable) : std::string_view();
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::size_t equals = std::min(item.find('='), item.size());
    const std::string_view name = item.substr(0, equals);
    const std::string_view value = item.substr(std::min(equals + 1, item.size()));
    std::uint64_t n_bytes = 0;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), n_bytes);
    if (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size()) refuse(item);
    if (name == "flat") {
      tuning.flat_bytes = n_bytes;
    } else if (name == "chunk" && n_bytes >= 4096) {
      tuning.chunk_bytes = n_bytes / 4096 * 4096;  // whole elements and lines
    } else if (name == "inplace") {
      tuning.in_place_bytes = n_bytes;
    } else {
      refuse(item);
    }
  }
  return tuning;
}

Tuning tuning_for(int n_ranks) {
  const char* const text = std::getenv("LOCKSTEP_TUNE");  // as Env::tune
  return tuning_for(n_ranks, text == nullptr ? std::nullopt : std::optional<std::string>(text));
}

}  // namespace lockstep::shared
