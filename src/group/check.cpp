#include "group/check.hpp"

#include "base/text.hpp"

namespace lockstep::internal {

std::string_view name_of(Check check) {
  switch (check) {
    case Check::off: return "off";
    case Check::light: return "light";
    case Check::full: return "full";
  }
  return "?";
}

std::uint64_t hash_of(const std::source_location& where) {
  std::uint64_t hash = 0xcbf29ce484222325ULL ^ where.line();
  for (const char c : base::base_name(where.file_name())) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;  // FNV-1a
  }
  return hash;
}

}  // namespace lockstep::internal
