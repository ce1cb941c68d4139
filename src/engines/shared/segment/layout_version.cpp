#include "engines/shared/segment/layout_version.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep::shared {

std::string release_text(std::string_view release, std::uint32_t layout) {
  const bool is_known = !release.empty() && std::ranges::all_of(release, [](char letter) {
    return letter > ' ' && letter <= '~';
  });
  return fmt::format("lockstep {} (layout {:08x})", is_known ? release : "of unknown version",
                     layout);
}

}  // namespace lockstep::shared
