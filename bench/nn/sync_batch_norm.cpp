// SyncBatchNorm over the ranks of `lockstep run -n 2 -- bench_sync_batch_norm` against libtorch's
// BatchNorm, which does not synchronise, on one thread per rank (--threads=N: on N, not bound to
// cores; run it alone then). The two alternate block by block;
// a row is the median of the blocks' medians, in us, on rank 0. `--processor-time` uses the
// thread's CPU clock: least disturbed by a busy machine, but without waits. Also runs on a single
// rank. In bf16 all of libtorch's layer is bf16; ours has float32 statistics, weight and bias. The
// last rows compare with a layer that does synchronise, composed of libtorch's operations and
// c10d's Gloo. `--json FILE`: the ratios, peer's time over ours, by names such as
// "BatchNorm 32x64x56x56 NCHW f32 forward". Any other argument keeps only the sizes equal to it.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <time.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <string>
#include <vector>

#include "rank.hpp"
#include "results.hpp"

#ifdef USE_C10D_GLOO
#include "composed_batch_norm.hpp"
#endif

namespace {

using lockstep::bench::median;
using torch::Tensor;

constexpr int kBlocks = 7;
constexpr double kBlockUs = 60e3;
clockid_t used_clock = CLOCK_MONOTONIC;
std::string only_sizes;  // empty: all

double now_us() {
  timespec now{};
  ::clock_gettime(used_clock, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

struct Times {
  double forward_us;
  double backward_us;
};

/// One step per call of the layer, over one activation.
template <class Layer>
class Candidate {
 public:
  Candidate(Layer layer, Tensor x, Tensor dy)
      : layer_(std::move(layer)), x_(std::move(x)), dy_(std::move(dy)) {
    step();
    n_steps_ = lockstep::all_reduce_value(
        static_cast<int>(std::clamp(kBlockUs / total(step()), 3.0, 1000.0)),
        lockstep::ReduceOp::min);
  }

  Times block() {
    std::vector<double> forward;
    std::vector<double> backward;
    lockstep::barrier();
    for (int i = 0; i < n_steps_; ++i) {
      const Times times = step();
      forward.push_back(times.forward_us);
      backward.push_back(times.backward_us);
    }
    return {median(forward), median(backward)};
  }

 private:
  static double total(Times times) { return times.forward_us + times.backward_us; }

  Times step() {
    const double begin = now_us();
    const Tensor y = layer_->forward(x_);
    const double middle = now_us();
    const auto gradients = torch::autograd::grad({y}, {x_, layer_->weight, layer_->bias}, {dy_});
    return {middle - begin, now_us() - middle};
  }

  Layer layer_;
  Tensor x_;
  Tensor dy_;
  int n_steps_ = 3;
};

struct Shape {
  std::vector<std::int64_t> sizes;
  bool is_channels_last;
  at::ScalarType type;
};

/// Forward and backward of the peer's layer and of ours.
using Figures = std::array<double, 4>;

template <class Theirs, class Ours>
Figures alternate(Theirs& theirs, Ours& ours) {
  std::array<std::vector<double>, 4> us;
  for (int i = 0; i < kBlocks; ++i) {
    const Times of_theirs = theirs.block();
    const Times of_ours = ours.block();
    us[0].push_back(of_theirs.forward_us);
    us[1].push_back(of_ours.forward_us);
    us[2].push_back(of_theirs.backward_us);
    us[3].push_back(of_ours.backward_us);
  }
  return {median(us[0]), median(us[1]), median(us[2]), median(us[3])};
}

/// Rank 0 gathers the rows here.
void add_row(lockstep::bench::Results& results, const char* peer, const Shape& shape,
             const Figures& us) {
  if (!lockstep::is_main_process()) return;
  const std::string name = fmt::format("{} {}{} {}", peer, fmt::join(shape.sizes, "x"),
                                       shape.sizes.size() == 2  ? ""
                                       : shape.is_channels_last ? " channels-last"
                                                                : " NCHW",
                                       shape.type == at::kFloat ? "f32" : "bf16");
  fmt::print("{:<43} {:>9.1f} {:>9.1f} {:>6.2f} {:>9.1f} {:>9.1f} {:>6.2f}\n", name, us[0], us[1],
             us[0] / us[1], us[2], us[3], us[2] / us[3]);
  std::fflush(stdout);
  results.add(name + " forward", us[0] / us[1]);
  results.add(name + " backward", us[2] / us[3]);
}

bool is_left_out(const Shape& shape) {
  return !only_sizes.empty() && only_sizes != fmt::format("{}", fmt::join(shape.sizes, "x"));
}

template <class Plain, class Synchronised>
void compare(const Shape& shape, lockstep::bench::Results& results) {
  if (is_left_out(shape)) return;
  Tensor x = torch::randn(shape.sizes);
  Tensor dy = torch::randn(shape.sizes);
  if (shape.is_channels_last) {
    x = x.contiguous(at::MemoryFormat::ChannelsLast);
    dy = dy.contiguous(at::MemoryFormat::ChannelsLast);
  }
  x = x.to(shape.type).set_requires_grad(true);
  dy = dy.to(shape.type);
  const std::int64_t channels = shape.sizes[1];
  Plain layer(channels);
  layer->to(shape.type);
  Candidate plain(layer, x, dy);
  Candidate synchronised(Synchronised(channels), x, dy);
  add_row(results, "BatchNorm", shape, alternate(plain, synchronised));
}

#ifdef USE_C10D_GLOO
void compare_with_composed(const Shape& shape, lockstep::bench::Results& results) {
  if (is_left_out(shape)) return;
  const Tensor x = torch::randn(shape.sizes).set_requires_grad(true);
  const Tensor dy = torch::randn(shape.sizes);
  lockstep::bench::ComposedBatchNorm layer(shape.sizes[1]);
  lockstep::nn::SyncBatchNorm2d own(shape.sizes[1]);
  if (!torch::allclose(layer->forward(x), own->forward(x), 1e-4, 1e-4)) {
    throw std::runtime_error("the composed BatchNorm has another result");
  }
  Candidate composed(layer, x, dy);
  Candidate synchronised(own, x, dy);
  add_row(results, "composed", shape, alternate(composed, synchronised));
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const std::string json_path = lockstep::bench::take_json_path(argc, argv);
  int n_threads = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--processor-time") == 0) {
      used_clock = CLOCK_THREAD_CPUTIME_ID;
    } else if (std::strncmp(argv[i], "--threads=", 10) == 0) {
      n_threads = std::atoi(argv[i] + 10);
      if (n_threads < 1) throw std::invalid_argument("--threads takes a number above 0");
    } else {
      only_sizes = argv[i];
    }
  }
  lockstep::bench::init_rank(n_threads);
  lockstep::bench::Results results;
  if (lockstep::is_main_process()) {
    fmt::print(
        "{} ranks of {} threads, libtorch {}; median us of {} blocks\n"
        "{:<43} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6}\n",
        lockstep::get_world_size(), n_threads, TORCH_VERSION, kBlocks, "", "peer fwd", "ours",
        "ratio", "peer bwd", "ours", "ratio");
  }
  using lockstep::nn::SyncBatchNorm1d;
  using lockstep::nn::SyncBatchNorm2d;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const auto& sizes :
         {std::vector<std::int64_t>{32, 64, 56, 56}, {32, 256, 14, 14}, {8, 64, 112, 112}}) {
      for (const bool is_channels_last : {false, true}) {
        compare<torch::nn::BatchNorm2d, SyncBatchNorm2d>({sizes, is_channels_last, type}, results);
      }
    }
    compare<torch::nn::BatchNorm1d, SyncBatchNorm1d>({{256, 128}, false, type}, results);
  }
#ifdef USE_C10D_GLOO
  compare_with_composed({{32, 64, 56, 56}, false, at::kFloat}, results);
  compare_with_composed({{32, 256, 14, 14}, false, at::kFloat}, results);
#endif
  if (lockstep::is_main_process() && !json_path.empty()) results.write(json_path);
  lockstep::destroy_dist();
  return 0;
}
