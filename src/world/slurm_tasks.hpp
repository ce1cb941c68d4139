#pragma once

#include <string_view>
#include <vector>

namespace lockstep::internal {

/// Tasks on each node of a Slurm step: "4(x2),1" means 4, 4 and 1. `name`: the variable that holds
/// the text. Throws UsageError naming both if the text is not such a list or has more than
/// kMaxWorldSize tasks.
std::vector<int> slurm_tasks_per_node(const char* name, std::string_view text);

}  // namespace lockstep::internal
