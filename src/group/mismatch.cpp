#include "group/mismatch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "group/failure.hpp"
#include "record/signature.hpp"

namespace lockstep::internal {
namespace {

/// Longer lists do not move the columns further to the right.
constexpr std::size_t kLongestList = 16;

constexpr std::string_view kByRank = "by rank ";

}  // namespace

void MismatchTable::add(int rank, std::string call, std::uint32_t fingerprint, Kind kind) {
  for (Line& line : lines_) {
    if (line.fingerprint != fingerprint || line.kind != kind || line.call != call) {
      continue;
    }
    // Two threads of a rank may have refused calls with the same text.
    const auto at = std::ranges::lower_bound(line.ranks, rank);
    if (at == line.ranks.end() || *at != rank) line.ranks.insert(at, rank);
    return;
  }
  lines_.push_back({{rank}, std::move(call), fingerprint, kind});
}

void MismatchTable::add(const Row& row) {
  const bool moves = moves_data(row.op);
  const bool is_tagged = !has_root(row.op) && row.root >= 0;
  has_layer_ |= is_tagged;
  has_count_by_rank_ |= moves && row.count.starts_with(kByRank);
  if (row.op == Op::broadcast) {
    (row.count == "0" ? has_empty_broadcast_ : has_filled_broadcast_) = true;
  }
  add(row.rank,
      fmt::format("{:<14}  {:<4}  {:<10}  {:<4}  {:<9}  {}{}", name_of(row.op),
                  moves ? name_of(row.dtype) : "-", moves ? row.count : "-",
                  has_root(row.op) ? std::to_string(row.root) : "-",
                  has_reduction(row.op) ? name_of(row.reduce) : "-", row.where,
                  is_tagged ? fmt::format(", layer {:04x}", row.root & 0xffff) : ""),
      row.fingerprint, Kind::here);
}

void MismatchTable::add_absent(int rank, std::string_view last_call) {
  add(rank, fmt::format("not arrived; last call: {}", last_call), /*fingerprint=*/0, Kind::absent);
}

void MismatchTable::add_refused(int rank, std::string_view text) {
  add(rank, std::string(text), /*fingerprint=*/0, Kind::refused);
}

std::vector<MismatchTable::Line> MismatchTable::sorted() const {
  MismatchTable merged;
  // Ranks that have refused different numbers of calls differ in nothing else that is not shown.
  const bool has_refused = std::ranges::find(lines_, Kind::refused, &Line::kind) != lines_.end();
  for (const Line& line : lines_) {
    for (const int rank : line.ranks) {
      merged.add(rank, line.call, has_refused ? 0 : line.fingerprint, line.kind);
    }
  }
  std::ranges::sort(merged.lines_, {}, [](const Line& line) {
    return std::tuple(line.kind, line.ranks.size(), line.ranks.front());
  });
  return std::move(merged.lines_);
}

std::vector<int> MismatchTable::minority() const {
  std::vector<Line> lines = sorted();
  std::vector<int> ranks;
  for (const Line& line : lines) {
    if (line.kind == Kind::refused) ranks.insert(ranks.end(), line.ranks.begin(), line.ranks.end());
  }
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (!ranks.empty()) return ranks;
  std::erase_if(lines, [](const Line& line) { return line.kind == Kind::absent; });
  if (lines.size() < 2 || lines.back().ranks.size() == lines[lines.size() - 2].ranks.size()) {
    return ranks;
  }
  lines.pop_back();
  for (const Line& line : lines) ranks.insert(ranks.end(), line.ranks.begin(), line.ranks.end());
  std::ranges::sort(ranks);
  return ranks;
}

std::string MismatchTable::text(const Call& call) const {
  const std::vector<Line> lines = sorted();
  std::vector<std::string> ranks;
  std::size_t width = std::string_view("rank").size();
  for (const Line& line : lines) {
    ranks.push_back(list_of(numbers_of(call, line.ranks)));
    width = std::max(width, std::min(ranks.back().size(), kLongestList));
  }
  std::string text = fmt::format(
      "the ranks made different calls; all ranks must make the same calls in the same order\n"
      "  {:<{}}  operation       type  count       root  reduction  where",
      "rank", width);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    fmt::format_to(std::back_inserter(text), "\n  {:<{}}  {}", ranks[i], width, lines[i].call);
  }
  const bool has_refused = !lines.empty() && lines.front().kind == Kind::refused;
  const auto is_alike = [&](const Line& line) {
    return std::ranges::any_of(lines, [&line](const Line& other) {
      return &other != &line && other.kind == line.kind && other.call == line.call;
    });
  };
  if (has_refused) {
    text +=
        "\n"
        "  a call that throws UsageError counts as a call: afterwards all ranks must continue with "
        "the same calls";
  } else if (std::ranges::any_of(lines, is_alike)) {
    text +=
        "\n"
        "  lines that look equal differ in a part of the call that is not shown";
  }
  if (has_empty_broadcast_ && has_filled_broadcast_) {
    text +=
        "\n"
        "  broadcast does not resize: give the data its size on all ranks before, or call "
        "broadcast_object";
  }
  if (has_layer_) {
    text += "\n  layer: a hash of its name in the module, or of the line that made it";
  }
  if (has_count_by_rank_) {
    text += "\n  by rank: a hash of the counts that a rank gives for all ranks";
  }
  return text;
}

std::string count_by_rank(std::uint64_t hash) {
  return fmt::format("{}{:04x}", kByRank, hash & 0xffffU);
}

std::string list_of(std::span<const int> numbers) {
  constexpr std::size_t kMin = 4;  // shortest run that is written as "first-last"
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    const std::size_t n = end - i >= kMin ? end - i : 1;
    fmt::format_to(std::back_inserter(text), "{}{}", text.empty() ? "" : ", ", numbers[i]);
    if (n > 1) fmt::format_to(std::back_inserter(text), "-{}", numbers[end - 1]);
    i += n;
  }
  return text;
}

std::string text_of_checks(const Call& call, std::span<const RankCheck> ranks) {
  std::string text = "LOCKSTEP_CHECK must be the same on all ranks, but it is";
  for (const auto& [rank, check] : ranks) {
    fmt::format_to(std::back_inserter(text), "{}{} on rank {}",
                   rank == ranks.front().rank ? " " : ", ", name_of(check), call.number_of(rank));
  }
  return text;
}

}  // namespace lockstep::internal
