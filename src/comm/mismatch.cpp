#include "comm/mismatch.hpp"

#include <fmt/format.h>

#include <iterator>

#include "comm/call_word.hpp"

namespace lockstep::comm {

void MismatchTable::add(const Row& row) {
  const bool moves = moves_data(row.op);
  fmt::format_to(std::back_inserter(text_), "\n  {:<4}  {:<14}  {:<4}  {:<10}  {:<4}  {:<9}  {}",
                 row.rank, name_of(row.op), moves ? name_of(row.dtype) : "-",
                 moves ? row.count : "-", has_root(row.op) ? std::to_string(row.root) : "-",
                 has_reduction(row.op) ? name_of(row.reduce) : "-", row.where);
}

void MismatchTable::add_absent(int rank, std::string_view last_call) {
  fmt::format_to(std::back_inserter(text_), "\n  {:<4}  not here yet; its last call: {}", rank,
                 last_call);
}

std::string text_of_checks(std::span<const RankCheck> ranks) {
  std::string text = "LOCKSTEP_CHECK must be the same on all ranks, but it is";
  for (const auto& [rank, check] : ranks) {
    fmt::format_to(std::back_inserter(text), "{}{} on rank {}",
                   rank == ranks.front().rank ? " " : ", ", name_of(check), rank);
  }
  return text;
}

}  // namespace lockstep::comm
