#pragma once

#include <lockstep/engine.hpp>
#include <span>
#include <string>
#include <string_view>

#include "comm/check.hpp"

/// The texts of a MismatchError, the same whichever engine finds it.
namespace lockstep::comm {

/// Who called what, a line for each rank.
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
  };

  void add(const Row& row);
  void add_absent(int rank, std::string_view last_call);
  const std::string& text() const { return text_; }

 private:
  std::string text_ =
      "the ranks made different calls; all ranks must call the same, in the same order\n"
      "  rank  operation       type  count       root  reduction  where";
};

struct RankCheck {
  int rank;
  Check check;
};
/// Of ranks that do not compare the same.
std::string text_of_checks(std::span<const RankCheck> ranks);

}  // namespace lockstep::comm
