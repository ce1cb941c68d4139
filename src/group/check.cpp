#include "group/check.hpp"

#include <cstdlib>

namespace lockstep::internal {

std::string_view name_of(Check check) {
  switch (check) {
    case Check::off: return "off";
    case Check::light: return "light";
    case Check::full: return "full";
  }
  return "?";
}

std::optional<Check> parse_check(std::string_view text) {
  for (const Check check : {Check::off, Check::light, Check::full}) {
    if (text == name_of(check)) return check;
  }
  return std::nullopt;
}

Check check_level() {
  const char* const text = std::getenv("LOCKSTEP_CHECK");
  return text == nullptr ? Check::light : parse_check(text).value_or(Check::light);
}

std::uint64_t hash_of(const std::source_location& where) {
  std::string_view file = where.file_name();
  file.remove_prefix(file.find_last_of('/') + 1);  // npos + 1 is 0
  std::uint64_t hash = 0xcbf29ce484222325ULL ^ where.line();
  for (const char c : file) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;  // FNV-1a
  }
  return hash;
}

}  // namespace lockstep::internal
