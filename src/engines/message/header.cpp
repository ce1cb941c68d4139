#include "engines/message/header.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <vector>

#include "base/text.hpp"
#include "group/mismatch.hpp"
#include "group/step.hpp"
#include "record/signature.hpp"

namespace lockstep::message {
namespace {

using internal::has_reduction;
using internal::has_root;
using internal::moves_data;

std::string where_of(const Header& header) {
  // Sent by a peer: the name may not be null-terminated.
  return header.line == 0 ? "an unknown line"
                          : fmt::format("{}:{}", base::text_in(header.file), header.line);
}

}  // namespace

Header HeaderMaker::of(const Call& step) {
  const Call& call = internal::outermost(step);
  Header header{};
  header.step = static_cast<std::uint8_t>(step.op);
  header.op = static_cast<std::uint8_t>(call.op);
  header.dtype = static_cast<std::uint8_t>(call.dtype);
  header.reduce = static_cast<std::uint8_t>(call.reduce);
  header.root = call.root;
  // If parts differ in size, so does each rank's count.
  header.count = call.counts.empty() ? call.count : 0;
  for (const std::size_t count : call.counts) {
    header.counts = (header.counts ^ count) * 0x9e3779b97f4a7c15U + 1;
  }
  header.n_refused = call.n_refused;
  header.check = call.check;
  header.line = call.where.line();
  if (call.where.file_name() != path_) {
    path_ = call.where.file_name();
    std::string_view file = base::base_name(path_);
    file.remove_prefix(file.size() - std::min(file.size(), file_.size() - 1));
    file_ = {};
    file.copy(file_.data(), file.size());
  }
  header.file = file_;
  return header;
}

bool same_compared_fields(const Header& a, const Header& b, bool compares_sites) {
  const auto op = static_cast<Op>(a.op);
  if (a.op != b.op || a.step != b.step || a.check != b.check || a.n_refused != b.n_refused) {
    return false;
  }
  if (compares_sites && (a.line != b.line || a.file != b.file)) return false;
  if (moves_data(op) && (a.dtype != b.dtype || a.count != b.count || a.counts != b.counts)) {
    return false;
  }
  return a.root == b.root && (!has_reduction(op) || a.reduce == b.reduce);
}

internal::Failure mismatch_failure(const Call& call, std::span<const Row> rows,
                                   std::span<const RefusedCall> refused) {
  const auto check_of = [](const Row& row) { return row.header.check; };
  if (std::ranges::adjacent_find(rows, std::not_equal_to(), check_of) != rows.end()) {
    std::vector<internal::RankCheck> checks;
    for (const Row& row : rows) checks.push_back({row.rank, row.header.check});
    return {.kind = internal::Failure::Kind::mismatch,
            .text = internal::text_of_checks(call, checks)};
  }
  internal::MismatchTable table;
  for (const auto& [rank, header] : rows) {
    table.add({.rank = rank,
               .op = static_cast<Op>(header.op),
               .dtype = static_cast<DType>(header.dtype),
               .reduce = static_cast<ReduceOp>(header.reduce),
               .root = header.root,
               .count = header.counts != 0 ? fmt::format("by rank {:04x}", header.counts & 0xffffU)
                                           : std::to_string(header.count),
               .where = where_of(header)});
  }
  for (const auto& [rank, text] : refused) table.add_refused(rank, text);
  return {.kind = internal::Failure::Kind::mismatch,
          .text = table.text(call),
          .peers = internal::PeerList::of(table.minority())};
}

}  // namespace lockstep::message
