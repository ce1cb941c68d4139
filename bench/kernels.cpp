// One thread, every instruction set of this CPU. Bytes: those that the algorithm must read and
// write, once each. bench_kernels --benchmark_filter='reduce/sum/f32'

#include <benchmark/benchmark.h>

#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "kernels/batch_norm_isa.hpp"
#include "kernels/reduce.hpp"
#include "kernels/reduce_isa.hpp"

namespace lockstep::kernels {
namespace {

void set_bytes(benchmark::State& state, std::size_t n_bytes) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(n_bytes));
}

// --- reduce -------------------------------------------------------------------------------------

/// A reference for sum over two f32 inputs.
void hand_written_sum(benchmark::State& state, std::size_t n_bytes) {
  const std::size_t count = n_bytes / sizeof(float);
  std::vector<float> a(count, 1);
  std::vector<float> b(count, 2);
  std::vector<float> out(count);
  for (auto _ : state) {
    const float* from_a = a.data();
    const float* from_b = b.data();
    float* to = out.data();
    for (std::size_t i = 0; i < count; ++i) to[i] = from_a[i] + from_b[i];
    benchmark::ClobberMemory();
  }
  set_bytes(state, 3 * n_bytes);
}

void run_reduce(benchmark::State& state, Isa isa, DType dtype, ReduceOp op, int n,
                std::size_t n_bytes) {
  // 1 in every integer; small positive numbers in every float
  std::vector<std::vector<unsigned char>> memory(static_cast<std::size_t>(n) + 1,
                                                 std::vector<unsigned char>(n_bytes, 1));
  std::vector<const void*> in;
  for (int r = 0; r < n; ++r) in.push_back(memory[static_cast<std::size_t>(r)].data());
  const ReduceFunction function =
      reduce_table(isa).function[static_cast<int>(dtype)][static_cast<int>(op)];
  for (auto _ : state) {
    function(in.data(), n, memory.back().data(), n_bytes / size_of(dtype));
    benchmark::ClobberMemory();
  }
  set_bytes(state, static_cast<std::size_t>(n + 1) * n_bytes);
}

// --- batch norm ---------------------------------------------------------------------------------

template <class T>
struct Activation {
  explicit Activation(BatchNormShape s)
      : shape(s),
        x(s.outer * s.channels * s.inner),
        dy(x.size()),
        out(x.size()),
        mean(s.channels),
        m2(s.channels),
        invstd(s.channels, 1),
        weight(s.channels, 1),
        bias(s.channels, 0) {
    std::minstd_rand random;
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (T& value : x) value = T(uniform(random));
    for (T& value : dy) value = T(uniform(random));
  }

  std::size_t n_bytes() const { return x.size() * sizeof(T); }

  BatchNormShape shape;
  std::vector<T> x, dy, out;
  std::vector<double> mean, m2, invstd;
  std::vector<ParameterOf<T>> weight, bias;
};

template <class T>
void run_batch_norm(benchmark::State& state, Isa isa, const std::string& what,
                    BatchNormShape shape) {
  Activation<T> a(shape);
  const BatchNormTable<T>& table = batch_norm_table<T>(isa);
  std::size_t n_streams = 0;
  for (auto _ : state) {
    if (what == "stats") {
      n_streams = 1;
      table.stats(a.x.data(), shape, a.mean.data(), a.m2.data());
    } else if (what == "normalize") {
      n_streams = 2;
      table.normalize(a.x.data(), shape, a.mean.data(), a.invstd.data(), a.weight.data(),
                      a.bias.data(), a.out.data(), Stores::cached);
    } else if (what == "backward_reduce") {
      n_streams = 2;
      table.backward_reduce(a.dy.data(), a.x.data(), shape, a.mean.data(), a.m2.data(),
                            a.invstd.data());
    } else {
      n_streams = 3;
      table.backward_elementwise(a.dy.data(), a.x.data(), shape, a.mean.data(), a.invstd.data(),
                                 a.weight.data(), a.mean.data(), a.m2.data(), a.out.data(),
                                 Stores::cached);
    }
    benchmark::ClobberMemory();
  }
  set_bytes(state, n_streams * a.n_bytes());
}

template <class T>
void register_batch_norm(Isa isa, const char* type) {
  const struct {
    const char* name;
    BatchNormShape shape;
  } shapes[] = {
      {"32x64x56x56/nchw", {32, 64, 56 * 56}},
      {"32x64x56x56/nhwc", {32 * 56 * 56, 64, 1}},
      {"32x256x14x14/nchw", {32, 256, 14 * 14}},
      {"32x256x14x14/nhwc", {32 * 14 * 14, 256, 1}},
      {"32x512x7x7/nchw", {32, 512, 7 * 7}},
      {"256x128", {256, 128, 1}},
      {"4096x10", {4096, 10, 1}},
  };
  for (const auto& s : shapes) {
    for (const char* what : {"stats", "normalize", "backward_reduce", "backward_elementwise"}) {
      benchmark::RegisterBenchmark(
          fmt::format("batch_norm/{}/{}/{}/{}", what, s.name, type, name_of(isa)).c_str(),
          [isa, what, shape = s.shape](benchmark::State& state) {
            run_batch_norm<T>(state, isa, what, shape);
          });
    }
  }
}

const bool registered = [] {
  for (const std::size_t n_bytes : {std::size_t{64} << 10, std::size_t{64} << 20}) {
    benchmark::RegisterBenchmark(fmt::format("hand_written/sum/f32/n=2/{}", n_bytes).c_str(),
                                 [=](benchmark::State& s) { hand_written_sum(s, n_bytes); });
  }
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (!is_supported(isa)) continue;
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::mean, ReduceOp::bxor}) {
      for (int type = 0; type < kDTypes; ++type) {
        const auto dtype = static_cast<DType>(type);
        if (!can_reduce(op, dtype)) continue;
        for (const int n : {2, 4, 8}) {
          for (const std::size_t n_bytes : {std::size_t{64} << 10, std::size_t{64} << 20}) {
            benchmark::RegisterBenchmark(
                fmt::format("reduce/{}/{}/n={}/{}/{}", name_of(op), name_of(dtype), n, n_bytes,
                            name_of(isa))
                    .c_str(),
                [=](benchmark::State& s) { run_reduce(s, isa, dtype, op, n, n_bytes); });
          }
        }
      }
    }
    register_batch_norm<float>(isa, "f32");
    register_batch_norm<double>(isa, "f64");
    register_batch_norm<Float16>(isa, "f16");
    register_batch_norm<BFloat16>(isa, "bf16");
  }
  return true;
}();

}  // namespace
}  // namespace lockstep::kernels
