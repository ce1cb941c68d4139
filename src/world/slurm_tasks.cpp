#include "world/slurm_tasks.hpp"

#include <fmt/format.h>

#include <charconv>

#include "world/variables.hpp"

namespace lockstep::internal {
namespace {

/// Removes a positive number from the front of `text`; 0 if there is none.
int take_number(std::string_view& text) {
  int value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || value < 1) return 0;
  text.remove_prefix(static_cast<std::size_t>(parsed.ptr - text.data()));
  return value;
}

bool take(std::string_view& text, std::string_view part) {
  if (!text.starts_with(part)) return false;
  text.remove_prefix(part.size());
  return true;
}

}  // namespace

std::vector<int> slurm_tasks_per_node(const char* name, std::string_view text) {
  const auto is_wrong = [&]() {
    reject(fmt::format("{} is '{}'; Slurm writes the tasks per node as in 4(x2),1", name, text));
  };
  std::vector<int> tasks;
  int total = 0;
  std::string_view rest = text;
  do {
    const int n_tasks = take_number(rest);
    int n_nodes = 1;
    if (take(rest, "(x")) {
      n_nodes = take_number(rest);
      if (!take(rest, ")")) is_wrong();
    }
    // Division instead of multiplication, to avoid overflow.
    if (n_tasks == 0 || n_nodes == 0 || n_tasks > (kMaxWorldSize - total) / n_nodes) is_wrong();
    total += n_tasks * n_nodes;
    tasks.insert(tasks.end(), static_cast<std::size_t>(n_nodes), n_tasks);
  } while (take(rest, ","));
  if (!rest.empty()) is_wrong();
  return tasks;
}

}  // namespace lockstep::internal
