#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace lockstep::test {

/// Values combined level by level, as every reduction of floats over ranks: neighbours, then
/// neighbours of these; the last one without a neighbour goes up as it is.
template <class T, class Combine>
T combined_in_tree(std::vector<T> values, const Combine& combine) {
  while (values.size() > 1) {
    std::vector<T> level;
    for (std::size_t i = 0; i < values.size(); i += 2) {
      level.push_back(i + 1 < values.size() ? combine(values[i], values[i + 1]) : values[i]);
    }
    values = std::move(level);
  }
  return values.front();
}

}  // namespace lockstep::test
