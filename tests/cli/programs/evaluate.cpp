// One program for every launcher: measures the squares of 0 to 1000, shared out among its ranks.
// What rank 0 prints does not depend on their number.
//   evaluate             as the launcher says, or alone
//   evaluate threads N   as N threads
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <lockstep/lockstep.hpp>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr std::int64_t kItems = 1001;

void evaluate(std::string_view launcher) {
  const auto [rank, n_ranks] = lockstep::get_dist_info();
  std::vector<std::int64_t> squares;
  for (std::int64_t i = rank; i < kItems; i += n_ranks) squares.push_back(i * i);

  std::int64_t n_items = static_cast<std::int64_t>(squares.size());
  lockstep::all_reduce(std::span(&n_items, 1));
  std::map<std::string, double> sums = {{"squares", 0}, {"items", 0}};
  for (const std::int64_t square : squares) {
    sums["squares"] += static_cast<double>(square);
    sums["items"] += 1;
  }
  lockstep::all_reduce_dict(sums);
  const auto largest = lockstep::all_reduce_value(squares.back(), lockstep::ReduceOp::max);
  std::string text = rank == 0 ? "agreed" : "";
  lockstep::broadcast_object(text);
  const auto all = lockstep::collect_results(squares, static_cast<std::size_t>(kItems));

  const std::string backend = lockstep::get_backend().value_or("none");
  std::fprintf(stderr, "rank %d of %d, local %d of %d, by %.*s, over %s\n", rank, n_ranks,
               lockstep::get_local_rank(), lockstep::get_local_size(),
               static_cast<int>(launcher.size()), launcher.data(), backend.c_str());
  if (rank != 0) return;
  bool in_order = all->size() == static_cast<std::size_t>(kItems);
  for (std::size_t i = 0; in_order && i < all->size(); ++i) {
    in_order = (*all)[i] == static_cast<std::int64_t>(i * i);
  }
  std::printf("items %ld, sum %.0f, mean %.3f, largest %ld, %s, %s\n", static_cast<long>(n_items),
              sums["squares"], sums["squares"] / sums["items"], static_cast<long>(largest),
              text.c_str(), in_order ? "in order" : "OUT OF ORDER");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 3 && std::string_view(argv[1]) == "threads") {
      lockstep::run_ranks(std::atoi(argv[2]), [] { evaluate("threads"); });
      return 0;
    }
    lockstep::init_dist();
    evaluate(lockstep::name_of(lockstep::infer_launcher()));
    lockstep::barrier();
    return 0;
  } catch (const std::exception& error) {
    std::printf("Error: %s\n", error.what());
    return 2;
  }
}
