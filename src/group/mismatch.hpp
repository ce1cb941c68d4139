#pragma once

#include <cstdint>
#include <lockstep/engine.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "group/check.hpp"

/// The texts of a MismatchError, the same for every engine.
namespace lockstep::internal {

/// The call of each rank: one line for each set of ranks with the same call, the smallest set
/// first, so that the ranks that differ remain if the message is truncated.
class MismatchTable {
 public:
  struct Row {
    int rank;
    Op op;
    DType dtype;
    ReduceOp reduce;
    int root;
    std::string count;
    std::string where;
    /// Hash of all that is compared, in case the other fields do not distinguish ranks.
    std::uint32_t fingerprint = 0;
  };

  void add(const Row& row);
  /// Absent ranks follow the others.
  void add_absent(int rank, std::string_view last_call);
  /// A call that the rank refused and others did not: "refused all_reduce #2: data is null".
  void add_refused(int rank, std::string_view text);
  /// With the numbers of the ranks in the group: the table has those of the call's engine.
  std::string text(const Call& call) const;
  /// The ranks that refused calls; if none did, those that have arrived and made another call than
  /// the largest set; none if no set is larger than all others.
  std::vector<int> minority() const;

 private:
  enum class Kind : std::uint8_t { refused, here, absent };  ///< in the order of their lines
  struct Line {
    std::vector<int> ranks;
    std::string call;
    std::uint32_t fingerprint;
    Kind kind;
  };
  void add(int rank, std::string call, std::uint32_t fingerprint, Kind kind);
  std::vector<Line> sorted() const;

  std::vector<Line> lines_;
  bool has_empty_broadcast_ = false;
  bool has_filled_broadcast_ = false;
  bool has_layer_ = false;
  bool has_count_by_rank_ = false;
};

/// "by rank 3fa1": a hash of the counts, for a call that has one count per rank.
std::string count_by_rank(std::uint64_t hash);

/// "0, 2, 5-90". The numbers must be in ascending order.
std::string list_of(std::span<const int> numbers);

struct RankCheck {
  int rank;
  Check check;
};
/// The text for ranks of the call's engine with different check levels.
std::string text_of_checks(const Call& call, std::span<const RankCheck> ranks);

}  // namespace lockstep::internal
