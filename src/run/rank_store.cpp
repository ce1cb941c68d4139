#include "run/rank_store.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <optional>
#include <utility>

namespace lockstep::run {

using shared::StoreAnswer;
using shared::StoreRequest;

StoreAnswer RankStore::answer(std::uint64_t world, const StoreRequest& request) {
  using Kind = StoreRequest::Kind;
  using Status = StoreAnswer::Status;
  if (world < world_) return {.status = Status::over};
  if (world > std::exchange(world_, world)) values_.clear();
  const auto& words = request.words;
  const auto found = words.empty() ? values_.end() : values_.find(words.front());
  const bool is_known = found != values_.end();
  switch (request.kind) {
    case Kind::set: values_[words[0]] = words[1]; return {};
    case Kind::append: {
      std::string& value = values_[words[0]];
      // An answer of get has no more.
      if (value.size() + words[1].size() > shared::kMaxStoreBytes / 2) {
        return {.status = Status::too_long};
      }
      value += words[1];
      return {};
    }
    case Kind::compare_set: {
      // As torch's stores: a key that is missing is set if nothing is expected.
      if (is_known ? found->second == words[1] : words[1].empty()) values_[words[0]] = words[2];
      const auto now = values_.find(words[0]);
      return {.value = now == values_.end() ? words[1] : now->second};
    }
    case Kind::get:
      if (!is_known) return {.status = Status::missing};
      return {.value = found->second};
    case Kind::add: {
      std::int64_t sum = 0;
      const std::string_view text = is_known ? std::string_view(found->second) : "0";
      const auto read = std::from_chars(text.begin(), text.end(), sum);
      if (read.ec != std::errc() || read.ptr != text.end() ||
          __builtin_add_overflow(sum, request.amount, &sum)) {
        return {.status = Status::not_a_number};
      }
      values_[words[0]] = std::to_string(sum);
      return {.number = sum};
    }
    case Kind::remove: return {.number = static_cast<std::int64_t>(values_.erase(words[0]))};
    case Kind::check: {
      const bool are_known =
          std::ranges::all_of(words, [&](const auto& key) { return values_.contains(key); });
      return {.status = are_known ? Status::done : Status::missing};
    }
    case Kind::count: return {.number = static_cast<std::int64_t>(values_.size())};
  }
  return {.status = Status::invalid};
}

std::string RankStore::answer(std::uint64_t world, std::string_view request) {
  const auto asked = shared::read_store_request(request);
  return bytes_of(asked ? answer(world, *asked)
                        : StoreAnswer{.status = StoreAnswer::Status::invalid});
}

}  // namespace lockstep::run
