#pragma once

#include <optional>
#include <string>

namespace lockstep::message {

/// What messages between hosts cost, by which algorithms are chosen. The same on all ranks:
/// otherwise they would wait for different messages. The defaults are those of 1.25us,25Gbit.
struct Costs {
  double message_us = 0.5;   ///< of one message, at both ends together
  double round_us = 1.75;    ///< of one message and its latency
  double byte_us = 0.32e-3;  ///< of one byte

  bool operator==(const Costs&) const = default;
};

/// Parses Env::network. Throws UsageError.
Costs parse_costs(const std::optional<std::string>& text);

/// In the form that parse_costs takes.
std::string describe(const Costs& costs);

}  // namespace lockstep::message
