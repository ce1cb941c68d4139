#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// What a rank asks of the keys and values that the ranks of a job share, and the answer. They are
/// those of a c10d::Store; the launcher of node 0 keeps them (RankStore), so they outlive every
/// rank.
namespace lockstep::shared {

/// Limit of a request, and of an answer.
inline constexpr std::size_t kMaxStoreBytes = 128 << 10;

struct StoreRequest {
  enum class Kind : std::uint32_t { set, append, compare_set, get, add, remove, check, count };
  Kind kind = Kind::count;
  std::int64_t amount = 0;  ///< of add
  /// The key, of check all keys; behind it the value of set and append, the expected and the new
  /// one of compare_set.
  std::vector<std::string> words{};
};

struct StoreAnswer {
  enum class Status : std::uint32_t {
    done,
    missing,       ///< the key, or one of them
    not_a_number,  ///< the value of add, or the sum is too large
    too_long,      ///< the value of append would be
    over,          ///< the world of the rank that asks
    invalid,       ///< the request
  };
  Status status = Status::done;
  std::int64_t number = 0;  ///< of add: the sum; of remove: 1 if the key was there; of count
  std::string value{};      ///< of get and compare_set
};

std::string bytes_of(const StoreRequest& request);
std::string bytes_of(const StoreAnswer& answer);
/// nullopt: damaged.
std::optional<StoreRequest> read_store_request(std::string_view bytes);
std::optional<StoreAnswer> read_store_answer(std::string_view bytes);

}  // namespace lockstep::shared
