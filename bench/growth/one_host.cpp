// Calls of one operation between threads, for instruction counts by valgrind: ./dev bench growth
// growth_one_host RANKS OPERATION BYTES CALLS; BYTES are those of a rank's result.

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <lockstep/lockstep.hpp>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace {

int number(std::string_view text) {
  int value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || value < 0) {
    throw std::invalid_argument(
        fmt::format("'{}' is not a valid number of RANKS, BYTES or CALLS", text));
  }
  return value;
}

/// One rank's calls, reusing its buffers.
void call(std::string_view operation, std::size_t n_bytes, int n_calls) {
  const auto n_ranks = static_cast<std::size_t>(lockstep::get_world_size());
  std::vector<float> data(n_bytes / sizeof(float), 1);
  const std::vector<std::uint8_t> part(n_bytes / n_ranks);
  std::vector<std::uint8_t> whole(part.size() * n_ranks);
  for (int i = 0; i < n_calls; ++i) {
    if (operation == "barrier") {
      lockstep::barrier();
    } else if (operation == "all_reduce") {
      lockstep::all_reduce(data);
    } else if (operation == "broadcast") {
      lockstep::broadcast(data);
    } else if (operation == "all_gather") {
      lockstep::all_gather(part, whole);
    } else {
      throw std::invalid_argument(
          fmt::format("'{}' is none of barrier, all_reduce, broadcast, all_gather", operation));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 5)
      throw std::invalid_argument("usage: growth_one_host RANKS OPERATION BYTES CALLS");
    const std::string_view operation = argv[2];
    const auto n_bytes = static_cast<std::size_t>(number(argv[3]));
    const int n_calls = number(argv[4]);
    // Calls are slow under valgrind.
    lockstep::run_ranks(number(argv[1]), [&] { call(operation, n_bytes, n_calls); },
                        {.timeout = std::chrono::minutes(60)});
  } catch (const std::exception& error) {
    fmt::print(stderr, "growth_one_host: {}\n", error.what());
    return 1;
  }
}
