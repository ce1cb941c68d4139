#include "engines/shared/bootstrap/store_request.hpp"

#include <cstring>

namespace lockstep::shared {
namespace {

/// n_words times a length and so many bytes follow.
struct Head {
  std::uint32_t sort;
  std::uint32_t n_words;
  std::int64_t number;
};

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_word(std::string& bytes, std::string_view word) {
  append(bytes, static_cast<std::uint32_t>(word.size()));
  bytes.append(word);
}

template <class T>
bool take(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof value) return false;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return true;
}

bool take_word(std::string_view& bytes, std::string& word) {
  std::uint32_t n = 0;
  if (!take(bytes, n) || bytes.size() < n) return false;
  word = bytes.substr(0, n);
  bytes.remove_prefix(n);
  return true;
}

}  // namespace

std::string bytes_of(const StoreRequest& request) {
  std::string bytes;
  append(bytes, Head{.sort = static_cast<std::uint32_t>(request.kind),
                     .n_words = static_cast<std::uint32_t>(request.words.size()),
                     .number = request.amount});
  for (const std::string& word : request.words) append_word(bytes, word);
  return bytes;
}

std::string bytes_of(const StoreAnswer& answer) {
  std::string bytes;
  append(bytes, Head{.sort = static_cast<std::uint32_t>(answer.status),
                     .n_words = 1,
                     .number = answer.number});
  append_word(bytes, answer.value);
  return bytes;
}

std::optional<StoreRequest> read_store_request(std::string_view bytes) {
  using Kind = StoreRequest::Kind;
  Head head{};
  if (!take(bytes, head) || head.sort > static_cast<std::uint32_t>(Kind::count)) return {};
  StoreRequest request{.kind = static_cast<Kind>(head.sort), .amount = head.number};
  while (!bytes.empty()) {
    if (!take_word(bytes, request.words.emplace_back())) return {};
  }
  const std::size_t n_words = request.words.size();
  const bool is_whole = request.kind == Kind::check         ? true
                        : request.kind == Kind::count       ? n_words == 0
                        : request.kind == Kind::set         ? n_words == 2
                        : request.kind == Kind::append      ? n_words == 2
                        : request.kind == Kind::compare_set ? n_words == 3
                                                            : n_words == 1;
  if (head.n_words != n_words || !is_whole) return {};
  return request;
}

std::optional<StoreAnswer> read_store_answer(std::string_view bytes) {
  using Status = StoreAnswer::Status;
  Head head{};
  StoreAnswer answer;
  if (!take(bytes, head) || head.sort > static_cast<std::uint32_t>(Status::invalid) ||
      head.n_words != 1 || !take_word(bytes, answer.value) || !bytes.empty()) {
    return {};
  }
  answer.status = static_cast<Status>(head.sort);
  answer.number = head.number;
  return answer;
}

}  // namespace lockstep::shared
