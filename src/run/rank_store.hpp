#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "engines/shared/bootstrap/store_request.hpp"

namespace lockstep::run {

/// The keys and values that the ranks of one world share: see store_request.hpp. Those of an
/// earlier world are gone with the first request of the next one.
class RankStore {
 public:
  /// Carries it out at once. `world`: of the rank that asks.
  shared::StoreAnswer answer(std::uint64_t world, const shared::StoreRequest& request);
  /// Of bytes that a rank sent.
  std::string answer(std::uint64_t world, std::string_view request);

 private:
  std::uint64_t world_ = 0;
  std::map<std::string, std::string, std::less<>> values_;
};

}  // namespace lockstep::run
