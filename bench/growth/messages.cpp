// Messages and bytes of calls of the message engine, with one rank per host: ./dev bench growth
// --messages
// growth_messages rounds|direct HOSTS...: between more than 8 hosts in rounds, or always from each
// to each as over a transport without rounds; for each operation and size a line of OPERATION
// BYTES, then MESSAGES BYTES for each number of hosts: what the rank with the most of them sends or
// receives in a call.

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <lockstep/engine.hpp>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "support/message_network.hpp"

namespace {

using lockstep::Op;

struct Counted {
  Op op;
  std::size_t n_bytes;  ///< of a rank's part, or of the result of all_reduce, reduce, broadcast
};
constexpr Counted kCounted[] = {
    {Op::barrier, 0},           {Op::all_reduce, 4},       {Op::all_reduce, 1 << 10},
    {Op::all_reduce, 64 << 10}, {Op::reduce, 4},           {Op::reduce, 64 << 10},
    {Op::broadcast, 4},         {Op::broadcast, 64 << 10}, {Op::all_gather, 4},
    {Op::all_gather, 1 << 10},  {Op::gather, 4},           {Op::gather, 1 << 10},
    {Op::scatter, 4},           {Op::scatter, 1 << 10},    {Op::reduce_scatter, 4},
    {Op::reduce_scatter, 1024}, {Op::all_to_all, 4},       {Op::all_to_all, 1 << 10},
};

lockstep::test::Traffic count(const Counted& counted, int n_hosts, bool has_rounds) {
  lockstep::test::MessageNetwork network(n_hosts, has_rounds);
  lockstep::test::run_message_ranks(
      n_hosts,
      [&](lockstep::Engine& engine) {
        const Op op = counted.op;
        const bool is_in_place =
            op == Op::all_reduce || op == Op::reduce || op == Op::broadcast || op == Op::barrier;
        const std::size_t n = counted.n_bytes / sizeof(float);
        const std::size_t n_all = is_in_place ? n : n * static_cast<std::size_t>(n_hosts);
        std::vector<float> in(is_in_place || op == Op::all_gather || op == Op::gather ? n : n_all);
        std::vector<float> out(op == Op::scatter || op == Op::reduce_scatter ? n : n_all);
        lockstep::Call call;
        call.op = op;
        call.dtype = lockstep::DType::f32;
        call.count = n;
        call.root = 0;
        call.out = out.data();
        call.in = is_in_place ? out.data() : in.data();
        call.timeout = std::chrono::minutes(60);
        engine.run(call);
      },
      &network);
  return network.most();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string_view mode = argc > 1 ? argv[1] : "";
    if (mode != "rounds" && mode != "direct") {
      throw std::invalid_argument("usage: growth_messages rounds|direct HOSTS...");
    }
    for (const Counted& counted : kCounted) {
      fmt::print("{} {}", lockstep::name_of(counted.op), counted.n_bytes);
      for (int i = 2; i < argc; ++i) {
        const auto most = count(counted, std::atoi(argv[i]), mode == "rounds");
        fmt::print(" {} {}", most.n_messages, most.n_bytes);
      }
      fmt::print("\n");
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "growth_messages: {}\n", error.what());
    return 1;
  }
}
