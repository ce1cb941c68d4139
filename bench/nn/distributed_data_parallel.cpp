// A training step of a resnet18 with SyncBatchNorm, batch 8 and one thread on each rank of
// `lockstep run -n 2 -- bench_distributed_data_parallel [IMAGE_SIZE...]`, and the cost added by
// communication, compared with the same step without any. Gradients are reduced by
// DistributedDataParallel, by buckets over c10d's Gloo, or by averaging every gradient after
// backward. Two more rows each have one half of DistributedDataParallel's row: synchronised
// statistics with local gradients, or the reverse. "waits only" exchanges nothing, but has a
// barrier before each BatchNorm's forward and after its backward: what is added is the time for
// which a rank waits because the other has not finished the same computation. All alternate step by
// step. A row is the median over the steps, in ms, on rank 0; "not hidden" is the median of the
// excess of a step over the step without communication of the same round, "beyond waits" that over
// "waits only".
// `--json FILE`: as shares of the step. `--layers`: also how long each rank waits at each barrier.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "rank.hpp"
#include "resnet18.hpp"
#include "results.hpp"

#ifdef USE_C10D_GLOO
#include "gloo.hpp"
#endif

namespace {

using namespace lockstep::bench;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kBatch = 8, kClasses = 1000;
constexpr std::chrono::seconds kTime{60};  // for each image size
constexpr std::size_t kMinSteps = 5;

/// One network, and how its gradients are averaged over the ranks.
class Candidate {
 public:
  explicit Candidate(const lockstep::Group& statistics, const Between& between = nullptr) {
    torch::manual_seed(1);
    net_ = resnet18(kClasses, between);
    lockstep::nn::convert_sync_batchnorm(net_, statistics);
    sgd_ = std::make_unique<torch::optim::SGD>(net_->parameters(), 1e-3);
  }
  virtual ~Candidate() = default;
  Candidate(const Candidate&) = delete;
  Candidate& operator=(const Candidate&) = delete;

  /// From the last moment at which any rank began to the end on this rank.
  double step_ms(const Tensor& x, const Tensor& labels) {
    for (const Tensor& parameter : net_->parameters()) {
      if (parameter.mutable_grad().defined()) parameter.mutable_grad().zero_();
    }
    lockstep::barrier();
    const auto begin = Clock::now();
    forward_and_backward(x, labels);
    sgd_->step();
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

  Tensor first_weight() const { return net_->parameters().front(); }

 protected:
  virtual void forward_and_backward(const Tensor& x, const Tensor& labels) = 0;

  Sequential net_{nullptr};

 private:
  std::unique_ptr<torch::optim::SGD> sgd_;
};

lockstep::Group this_rank() {
  return lockstep::default_group().split(/*color=*/lockstep::get_rank());
}

/// Gradients stay local: the ranks only wait for each other.
class NoExchange : public Candidate {
 public:
  using Candidate::Candidate;

 private:
  void forward_and_backward(const Tensor& x, const Tensor& labels) override {
    torch::cross_entropy_loss(net_->forward(x), labels).backward();
    lockstep::barrier();
  }
};

/// For each barrier of a step, in their order, for how long this rank has waited there.
struct Waits {
  std::size_t next = 0;  ///< the step's next barrier
  std::vector<double> ms = {};

  void wait() {
    const auto begin = Clock::now();
    lockstep::barrier();
    const std::chrono::duration<double, std::milli> waited = Clock::now() - begin;
    if (next == ms.size()) ms.push_back(0);
    ms[next++] += waited.count();
  }
};

/// A barrier in forward, and one in backward.
struct WaitImpl : Cloneable<WaitImpl> {
  explicit WaitImpl(std::shared_ptr<Waits> of_step) : waits(std::move(of_step)) {}
  void reset() override {}
  Tensor forward(const Tensor& x) {
    waits->wait();
    Tensor y = x.view_as(x);
    y.register_hook([all = waits](const Tensor&) { all->wait(); });
    return y;
  }
  std::shared_ptr<Waits> waits;
};
TORCH_MODULE(Wait);

class WaitsOnly : public Candidate {
 public:
  explicit WaitsOnly(std::shared_ptr<Waits> waits)
      : Candidate(this_rank(), [waits](Sequential& net) { net->push_back(Wait(waits)); }),
        waits_(std::move(waits)) {}

 private:
  void forward_and_backward(const Tensor& x, const Tensor& labels) override {
    waits_->next = 0;
    torch::cross_entropy_loss(net_->forward(x), labels).backward();
    waits_->wait();
  }
  std::shared_ptr<Waits> waits_;
};

class Ddp : public Candidate {
 public:
  explicit Ddp(const lockstep::Group& statistics) : Candidate(statistics), ddp_(net_) {}

 private:
  void forward_and_backward(const Tensor& x, const Tensor& labels) override {
    torch::cross_entropy_loss(ddp_(x), labels).backward();
  }
  lockstep::nn::DistributedDataParallel<Sequential> ddp_;
};

class AfterBackward : public Candidate {
 public:
  AfterBackward() : Candidate(lockstep::default_group()) {}

 private:
  void forward_and_backward(const Tensor& x, const Tensor& labels) override {
    torch::cross_entropy_loss(net_->forward(x), labels).backward();
    for (const Tensor& parameter : net_->parameters()) {
      lockstep::nn::all_reduce(parameter.mutable_grad(), lockstep::ReduceOp::mean);
    }
  }
};

#ifdef USE_C10D_GLOO
/// Buckets as in PyTorch's DDP (reverse order, the first of 1 MiB, then 25 MiB; gradients are views
/// of them), each passed to ProcessGroupGloo as soon as it is full, while backward continues.
class C10d : public Candidate {
 public:
  C10d() : Candidate(lockstep::default_group()), gloo_(make_gloo()) {
    auto parameters = net_->parameters();
    std::reverse(parameters.begin(), parameters.end());
    std::int64_t limit = 1 << 20;
    for (auto first = parameters.begin(); first != parameters.end(); limit = 25 << 20) {
      std::int64_t n = 0;
      auto last = first;
      while (last != parameters.end() && n * 4 < limit) n += (last++)->numel();
      buckets_.push_back({torch::zeros({n}), static_cast<std::size_t>(last - first)});
      for (n = 0; first != last; ++first) {
        first->mutable_grad() =
            buckets_.back().gradients.narrow(0, n, first->numel()).view_as(*first);
        n += first->numel();
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(*first));
        accumulators_.back()->add_post_hook(std::make_unique<Ready>(*this, buckets_.size() - 1));
      }
    }
  }

 private:
  struct Bucket {
    Tensor gradients;
    std::size_t n_parameters;
    std::size_t n_ready = 0;
    c10::intrusive_ptr<c10d::Work> work = {};
  };

  struct Ready : torch::autograd::FunctionPostHook {
    Ready(C10d& all, std::size_t bucket) : all_(all), bucket_(bucket) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      Bucket& bucket = all_.buckets_[bucket_];
      if (++bucket.n_ready == bucket.n_parameters) {
        std::vector<Tensor> tensors{bucket.gradients.div_(lockstep::get_world_size())};
        bucket.work = all_.gloo_->allreduce(tensors);
      }
      return outputs;
    }
    C10d& all_;
    std::size_t bucket_;
  };

  void forward_and_backward(const Tensor& x, const Tensor& labels) override {
    torch::cross_entropy_loss(net_->forward(x), labels).backward();
    for (Bucket& bucket : buckets_) {
      bucket.work->wait();
      bucket.n_ready = 0;
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::vector<Bucket> buckets_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
};
#endif

struct Row {
  std::string name;
  std::unique_ptr<Candidate> candidate;
  bool is_synchronised = true;  // statistics and gradients
  std::vector<double> ms = {};
};

/// Of the steps of the same rounds.
double median_excess(const Row& row, const Row& other) {
  std::vector<double> added;
  for (std::size_t i = 0; i < row.ms.size(); ++i) added.push_back(row.ms[i] - other.ms[i]);
  return median(added);
}

/// All ranks call it.
void print_waits(const std::vector<double>& sums, std::size_t n_steps) {
  const auto by_rank = lockstep::all_gather_object(sums);
  if (!lockstep::is_main_process()) return;
  fmt::print("barrier: ms that each rank waits there, mean of {} steps\n", n_steps);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    fmt::print("{:>7}", i);
    for (const auto& waited : by_rank) {
      fmt::print("{:>10.3f}", waited[i] / static_cast<double>(n_steps));
    }
    fmt::print("\n");
  }
}

void compare(std::int64_t size, bool prints_layers, Results& results) {
  const lockstep::Group world = lockstep::default_group();
  std::vector<Row> rows;
  rows.push_back({"no other rank", std::make_unique<NoExchange>(this_rank()), false});
  const auto waits = std::make_shared<Waits>();
  rows.push_back({"waits only", std::make_unique<WaitsOnly>(waits), false});
  rows.push_back({"statistics only", std::make_unique<NoExchange>(world), false});
  rows.push_back({"gradients only", std::make_unique<Ddp>(this_rank()), false});
  rows.push_back({"DistributedDataParallel", std::make_unique<Ddp>(world)});
#ifdef USE_C10D_GLOO
  rows.push_back({"buckets over c10d Gloo", std::make_unique<C10d>()});
#endif
  rows.push_back({"average after backward", std::make_unique<AfterBackward>()});
  torch::manual_seed(2 + lockstep::get_rank());
  const Tensor x = torch::rand({kBatch, 3, size, size});
  const Tensor labels = torch::randint(kClasses, {kBatch});
  for (Row& row : rows) row.candidate->step_ms(x, labels);  // afterwards the buckets are rebuilt
  const auto end = Clock::now() + kTime;
  std::mt19937 generator(1);  // the same on all ranks
  std::vector<std::size_t> turns(rows.size());
  std::iota(turns.begin(), turns.end(), 0);
  for (bool goes_on = true; goes_on; lockstep::broadcast_object(goes_on)) {
    // A step depends on the caches left by the previous one, so the order is shuffled.
    std::shuffle(turns.begin(), turns.end(), generator);
    for (const std::size_t i : turns) {
      rows[i].ms.push_back(rows[i].candidate->step_ms(x, labels));
    }
    goes_on = Clock::now() < end || rows[0].ms.size() < kMinSteps;
  }
  std::vector<Tensor> weights;
  for (const Row& row : rows) {
    if (row.is_synchronised) weights.push_back(row.candidate->first_weight());
  }
  for (const Tensor& other : weights) {
    const double difference = (other - weights[0]).abs().max().item<double>();
    if (difference > 1e-4) {
      throw std::runtime_error(
          fmt::format("two ways that should agree have other weights, by {}", difference));
    }
  }
  if (prints_layers) print_waits(waits->ms, rows[0].ms.size() + 1);
  if (!lockstep::is_main_process()) return;
  for (const Row& row : rows) {
    const double ms = median(row.ms), not_hidden = median_excess(row, rows[0]) / ms,
                 beyond_waits = median_excess(row, rows[1]) / ms;
    const std::string name = fmt::format("{0}x{0} {1}", size, row.name);
    fmt::print("{:<37} {:>10.1f} {:>8.1f} % {:>8.1f} %\n", name, ms, 100 * not_hidden,
               100 * beyond_waits);
    results.add(name + ": not hidden", not_hidden);
    results.add(name + ": beyond waits", beyond_waits);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string json_path = take_json_path(argc, argv);
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool prints_layers = std::erase(arguments, "--layers") > 0;
  if (arguments.empty()) arguments = {"64", "224"};
  Results results;
  init_rank();
  if (lockstep::is_main_process()) {
    fmt::print("resnet18, {} ranks, batch {}, libtorch {}\n{:<37} {:>10} {:>10} {:>10}\n",
               lockstep::get_world_size(), kBatch, TORCH_VERSION, "", "step, ms", "not hidden",
               "beyond waits");
  }
  for (const std::string& size : arguments) compare(std::stoi(size), prints_layers, results);
  if (lockstep::is_main_process() && !json_path.empty()) results.write(json_path);
  lockstep::destroy_dist();
  return 0;
}
