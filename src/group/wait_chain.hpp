#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <lockstep/engine.hpp>
#include <string>
#include <vector>

namespace lockstep::internal {

/// Ranks that wait, each for the next, of which the first keeps `waiter` waiting.
struct WaitChain {
  std::vector<int> ranks;  ///< from the one that waiter waits for; each of them once
  std::vector<int> late;   ///< the last, or in a cycle all of its ranks but waiter
  std::string text;        ///< ", which waits for rank 1, which waits for rank 2"
};

/// Of ranks of the call's engine. awaited_by(rank): the rank for which that one waits; itself if it
/// waits for none.
template <class AwaitedBy>
WaitChain chain_of(const Call& call, int waiter, int awaited, AwaitedBy awaited_by) {
  WaitChain chain{.ranks = {awaited}, .late = {}, .text = {}};
  for (;;) {
    const int last = chain.ranks.back();
    const int next = awaited_by(last);
    if (next == last) {
      chain.late = {last};
      return chain;
    }
    fmt::format_to(std::back_inserter(chain.text), ", which waits for rank {}",
                   call.number_of(next));
    const auto begin = next == waiter ? chain.ranks.begin() : std::ranges::find(chain.ranks, next);
    if (begin != chain.ranks.end()) {
      chain.late.assign(begin, chain.ranks.end());
      return chain;
    }
    chain.ranks.push_back(next);
  }
}

}  // namespace lockstep::internal
