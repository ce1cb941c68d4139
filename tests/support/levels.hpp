#pragma once

#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep::test {

/// A hierarchical group's levels number its ranks anew, and say so: what the innermost level says,
/// and which ranks of the group it numbers.
struct LevelWords {
  std::string text;
  std::vector<int> ranks;
};

inline LevelWords innermost_level(const std::string& text, int n_ranks) {
  LevelWords words{text, {}};
  for (int rank = 0; rank < n_ranks; ++rank) words.ranks.push_back(rank);
  const std::regex level(R"(where ranks? ([0-9, ]+) of the group (is|are) 0 to \d+: )");
  std::smatch match;
  while (std::regex_search(words.text, match, level)) {
    words.ranks.clear();
    std::istringstream numbers(match[1].str());
    for (std::string number; std::getline(numbers, number, ',');) {
      words.ranks.push_back(std::stoi(number));
    }
    words.text = std::string(match.suffix());
  }
  return words;
}

}  // namespace lockstep::test
