#pragma once

#include <cstdint>
#include <lockstep/engine.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "group/check.hpp"

/// The texts of a MismatchError, the same whichever engine finds it.
namespace lockstep::internal {

/// Who called what: a line for each set of ranks that called the same, the smallest set first, so
/// that whoever differs is in what is left where a message has an end.
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
    /// Of all that is compared, should the rest not tell ranks apart.
    std::uint32_t fingerprint = 0;
  };

  void add(const Row& row);
  /// Absent ranks stand behind the others.
  void add_absent(int rank, std::string_view last_call);
  std::string text() const;

 private:
  struct Line {
    std::vector<int> ranks;
    std::string call;
    std::uint32_t fingerprint;
    bool is_absent;
  };
  void add(int rank, std::string call, std::uint32_t fingerprint, bool is_absent);

  std::vector<Line> lines_;
};

/// "by rank 3fa1": for the count of a call that has one for each rank, a hash of all of them.
std::string count_by_rank(std::uint64_t hash);

/// "0, 2, 5-90": of numbers in ascending order.
std::string list_of(std::span<const int> numbers);

struct RankCheck {
  int rank;
  Check check;
};
/// Of ranks that do not compare the same.
std::string text_of_checks(std::span<const RankCheck> ranks);

}  // namespace lockstep::internal
