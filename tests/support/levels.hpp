#pragma once

#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep::test {

/// The levels of a hierarchical group renumber its ranks, and errors report that: the text of the
/// innermost level, and the ranks of the group at that level.
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
