#include <fmt/format.h>

#include <map>
#include <set>

#include "dist/messages.hpp"

namespace lockstep::detail {
namespace {

constexpr std::size_t kMaxNamedKeys = 3;  // a message names only the first few keys

using Shapes = std::map<std::string, std::uint64_t>;

/// Describes how one rank's dict differs from rank 0's.
std::string difference(const Shapes& first, const Shapes& other, std::size_t rank) {
  std::string text;
  std::size_t n_different = 0;
  const auto add = [&](const std::string& what) {
    if (++n_different > kMaxNamedKeys) return;
    text += (n_different == 1 ? "" : ", ") + what;
  };
  for (const auto& [key, count] : first) {
    const auto match = other.find(key);
    if (match == other.end()) {
      add(fmt::format("'{}' is on rank 0 but not on rank {}", key, rank));
    } else if (match->second != count) {
      add(fmt::format("'{}' has {} elements on rank 0 and {} on rank {}", key, count, match->second,
                      rank));
    }
  }
  for (const auto& [key, count] : other) {
    if (!first.contains(key)) add(fmt::format("'{}' is on rank {} but not on rank 0", key, rank));
  }
  if (n_different > kMaxNamedKeys)
    text += fmt::format(", and {} more", n_different - kMaxNamedKeys);
  return text;
}

}  // namespace

void check_dicts(const ObjectCall& call, std::span<const DictEntry> entries, ReduceOp op) {
  Shapes shapes;
  for (const auto& [key, count] : entries) shapes.emplace(key, count);
  Bytes mine;
  encode(mine, shapes);

  // The usual case, equal shapes, costs one small collective: every rank's header has the checksum
  // of its shapes.
  ObjectCall with_op = call;
  with_op.agreed = static_cast<std::uint64_t>(op);
  const auto headers = exchange_headers(with_op, mine);
  for (std::size_t r = 0; r < headers.size(); ++r) {
    if (headers[r].agreed == headers[0].agreed) continue;
    throw MismatchError(context_of(call),
                        fmt::format("rank 0 reduces by {}, rank {} by {}; all ranks must use the "
                                    "same. The group stays usable",
                                    lockstep::name_of(static_cast<ReduceOp>(headers[0].agreed)), r,
                                    lockstep::name_of(static_cast<ReduceOp>(headers[r].agreed))));
  }
  const auto same = [&](const MessageHeader& header) {
    return header.checksum == headers[0].checksum && header.n_bytes == headers[0].n_bytes;
  };
  if (std::all_of(headers.begin(), headers.end(), same)) return;

  const auto all = all_gather_object(shapes, call.group, call.limit.timeout(), call.where);
  std::string text = "the ranks' dicts differ:";
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] != all[0]) text += ' ' + difference(all[0], all[r], r) + ';';
  }
  throw MismatchError(context_of(call),
                      text + " give all ranks the same keys and lengths. The group stays usable");
}

}  // namespace lockstep::detail
