#include <fmt/format.h>

#include <cstring>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>
#include <lockstep/world.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cli/doctor/checks.hpp"
#include "kernels/reduce.hpp"
#include "kernels/reduce_isa.hpp"

namespace lockstep::cli {
namespace {

using Bytes = std::vector<std::byte>;

/// Elements of one rank's part: more than one SIMD vector, plus a remainder.
constexpr std::size_t kCount = 19;

/// Small positive numbers, different for each rank and position; every third float is subnormal.
Bytes values_of(DType dtype, int rank, std::size_t count) {
  const std::size_t size = size_of(dtype);
  Bytes bytes(count * size);
  for (std::size_t i = 0; i < count; ++i) {
    auto value = static_cast<std::uint8_t>((3 * static_cast<std::size_t>(rank) + 5 * i) % 7 + 1);
    if (name_of(dtype) == "bool") value &= 1U;
    std::byte* const to = bytes.data() + i * size;
    const auto put = [to](auto number) { std::memcpy(to, &number, sizeof number); };
    if (!is_floating(dtype) || i % 3 == 2) {
      put(value);  // the lowest byte: of a float the smallest subnormals
    } else if (dtype == DType::f64) {
      put(value / 8.0);
    } else if (dtype == DType::f32) {
      put(static_cast<float>(value) / 8);
    } else if (dtype == DType::f16) {
      put(Float16(static_cast<float>(value) / 8));
    } else {
      put(BFloat16(static_cast<float>(value) / 8));
    }
  }
  return bytes;
}

/// Calls every operation of a group and compares with a single-threaded reference.
class Trial {
 public:
  explicit Trial(const Group& group)
      : group_(group), rank_(group.rank()), n_(static_cast<std::size_t>(group.size())) {}

  /// Throws std::runtime_error if a result is wrong.
  void run() {
    group_.barrier();
    for (int dtype = 0; dtype < kernels::kDTypes; ++dtype) {
      dtype_ = static_cast<DType>(dtype);
      for (const ReduceOpTraits& known : kReduceOps) {
        if (can_reduce(known.op, dtype_)) reduce(known.op);
      }
      for (int root = 0; root < group_.size(); ++root) move(root);
      exchange();
    }
  }

 private:
  Bytes values(std::size_t rank, std::size_t count) const {
    return values_of(dtype_, static_cast<int>(rank), count);
  }
  std::size_t n_bytes(std::size_t count) const { return count * size_of(dtype_); }
  Elements all(Bytes& bytes) const {
    return {.data = bytes.data(), .count = bytes.size() / size_of(dtype_), .dtype = dtype_};
  }
  /// The part of `rank` among parts of kCount elements.
  Bytes part(const Bytes& bytes, std::size_t rank) const {
    const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(rank * n_bytes(kCount));
    return {first, first + static_cast<std::ptrdiff_t>(n_bytes(kCount))};
  }
  std::size_t me() const { return static_cast<std::size_t>(rank_); }

  void check(std::string_view operation, const Bytes& got, const Bytes& expected,
             std::string_view detail = {}) const {
    if (got == expected) return;
    throw std::runtime_error(fmt::format("{} of {}{}{} on rank {} of {} over {} is wrong",
                                         operation, name_of(dtype_), detail.empty() ? "" : ", ",
                                         detail, rank_, n_, group_.backend()));
  }

  Bytes reduced(ReduceOp op, std::size_t count) const {
    std::vector<Bytes> inputs;
    std::vector<const void*> pointers;
    for (std::size_t r = 0; r < n_; ++r) inputs.push_back(values(r, count));
    for (const Bytes& input : inputs) pointers.push_back(input.data());
    if (n_ == 1) return inputs.front();
    Bytes out(n_bytes(count));
    const auto& table = kernels::reduce_table(kernels::Isa::scalar);
    table.function[static_cast<int>(dtype_)][static_cast<int>(op)](
        pointers.data(), static_cast<int>(n_), out.data(), count);
    return out;
  }

  void reduce(ReduceOp op) const {
    const Bytes expected = reduced(op, n_ * kCount);
    Bytes data = values(me(), n_ * kCount);
    group_.all_reduce(all(data), op);
    check("all_reduce", data, expected, name_of(op));
    for (int root = 0; root < group_.size(); ++root) {
      data = values(me(), n_ * kCount);
      group_.reduce(all(data), root, op);
      check("reduce", data, rank_ == root ? expected : values(me(), n_ * kCount), name_of(op));
    }
    data = values(me(), n_ * kCount);
    Bytes out(n_bytes(kCount));
    group_.reduce_scatter(all(data), all(out), op);
    check("reduce_scatter", out, part(expected, me()), name_of(op));
  }

  Bytes gathered() const {
    Bytes expected;
    for (std::size_t r = 0; r < n_; ++r) {
      const Bytes one = values(r, kCount);
      expected.insert(expected.end(), one.begin(), one.end());
    }
    return expected;
  }

  void move(int root) const {
    const std::string detail = fmt::format("root {}", root);
    Bytes data = values(me(), kCount);
    group_.broadcast(all(data), root);
    check("broadcast", data, values(static_cast<std::size_t>(root), kCount), detail);
    data = values(me(), kCount);
    Bytes out(n_bytes(n_ * kCount));
    group_.gather(all(data), all(out), root);
    if (rank_ == root) check("gather", out, gathered(), detail);
    Bytes in = values(static_cast<std::size_t>(root), n_ * kCount);
    group_.scatter(all(in), all(data), root);
    check("scatter", data, part(in, me()), detail);
  }

  void exchange() const {
    Bytes data = values(me(), kCount);
    Bytes out(n_bytes(n_ * kCount));
    group_.all_gather(all(data), all(out));
    check("all_gather", out, gathered());
    Bytes in = values(me(), n_ * kCount);
    group_.all_to_all(all(in), all(out));
    Bytes expected;
    for (std::size_t r = 0; r < n_; ++r) {
      const Bytes one = part(values(r, n_ * kCount), me());
      expected.insert(expected.end(), one.begin(), one.end());
    }
    check("all_to_all", out, expected);
    if (n_ == 1) return;
    // A send may wait for its recv: neighbours start with opposite operations.
    const int next = (rank_ + 1) % group_.size();
    const int before = (rank_ + group_.size() - 1) % group_.size();
    Bytes received(n_bytes(kCount));
    if (rank_ % 2 == 0) group_.send(all(data), next);
    group_.recv(all(received), before);
    if (rank_ % 2 != 0) group_.send(all(data), next);
    check("recv", received, values(static_cast<std::size_t>(before), kCount));
  }

  const Group& group_;
  const int rank_;
  const std::size_t n_;
  DType dtype_ = DType::u8;
};

std::string coverage_text() {
  return fmt::format("every operation, {} types, {} reductions and each root", kernels::kDTypes,
                     kReduceOps.size());
}

template <class F>
Finding finding_of(const std::string& engine, int n_ranks, F run) {
  const std::string name = "results " + engine;
  try {
    run();
    return {
        name, State::good,
        fmt::format("{} over {} rank(s) match a single-core reference", coverage_text(), n_ranks)};
  } catch (const Error& error) {
    return {name, State::note, error.what(), "the lines above say what this machine lacks"};
  } catch (const std::exception& error) {
    return {name, State::missing, error.what(),
            "this build gives wrong results here: build it on this machine, run ./dev test, and "
            "report it"};
  }
}

}  // namespace

Findings check_operations() {
  constexpr int kRanks = 3;
  return {finding_of("solo", 1, [] { Trial(Group()).run(); }), finding_of("shared", kRanks, [] {
            run_ranks(kRanks, [] { Trial(default_group()).run(); });
          })};
}

int doctor_operations(const std::string& engine) {
  init_dist({.backend = engine});
  const Group& group = default_group();
  std::string wrong;
  try {
    Trial(group).run();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    wrong = error.what();
    fmt::print(stderr, "lockstep doctor: {}\n", wrong);
  }
  const bool is_right = all_reduce_value(wrong.empty() ? 1 : 0, ReduceOp::min) == 1;
  if (is_right && is_main_process()) {
    fmt::print("{} over {} rank(s) and {} match a single-core reference\n", coverage_text(),
               group.size(), group.backend());
  }
  destroy_dist();
  return is_right ? 0 : 1;
}

}  // namespace lockstep::cli
