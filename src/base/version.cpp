#include "base/version.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep::base {

std::string_view version() noexcept { return LOCKSTEP_VERSION; }

std::uint32_t layout_version() noexcept { return LOCKSTEP_LAYOUT; }

std::string release_text(std::string_view release, std::uint32_t layout) {
  const bool is_known = !release.empty() && std::ranges::all_of(release, [](char letter) {
    return letter > ' ' && letter <= '~';
  });
  return fmt::format("lockstep {} (layout {:08x})", is_known ? release : "of unknown version",
                     layout);
}

}  // namespace lockstep::base
