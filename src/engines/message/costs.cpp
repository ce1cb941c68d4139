#include "engines/message/costs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <lockstep/error.hpp>
#include <string_view>

namespace lockstep::message {
namespace {

/// The number of `text` if it is above 0 and followed by `unit`, else 0.
double positive(std::string_view text, std::string_view unit) {
  constexpr double kMin = 1e-6, kMax = 1e9;
  if (!text.ends_with(unit)) return 0;
  text.remove_suffix(unit.size());
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  const bool is_valid = parsed.ec == std::errc() && parsed.ptr == end;
  return is_valid && value >= kMin && value <= kMax ? value : 0;
}

}  // namespace

Costs parse_costs(const std::optional<std::string>& text) {
  if (!text) return {};
  const std::string_view all = *text;
  const std::size_t comma = std::min(all.find(','), all.size());
  const double latency_us = positive(all.substr(0, comma), "us");
  const double gbits = positive(all.substr(std::min(comma + 1, all.size())), "Gbit");
  if (latency_us == 0 || gbits == 0) {
    throw UsageError(
        {.operation = "init_dist"},
        fmt::format("LOCKSTEP_NETWORK is '{}'; it takes the latency and the bandwidth of the "
                    "network between hosts, both above 0, as 25us,100Gbit",
                    all));
  }
  // The CPU time of a message grows with that of the transport, of which the latency consists on a
  // near network; on a far one it is distance.
  constexpr double kMessageShare = 0.4, kLongestMessage = 10;
  const double message_us = std::min(kMessageShare * latency_us, kLongestMessage);
  constexpr double kUsPerByteAtOneGbit = 8e-3;
  return {.message_us = message_us,
          .round_us = message_us + latency_us,
          .byte_us = kUsPerByteAtOneGbit / gbits};
}

std::string describe(const Costs& costs) {
  return fmt::format("{:g}us,{:g}Gbit", costs.round_us - costs.message_us, 8e-3 / costs.byte_us);
}

}  // namespace lockstep::message
