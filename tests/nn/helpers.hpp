#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>
#include <span>
#include <string>
#include <vector>

namespace lockstep::nn::testing {

/// A hang ends as a TimeoutError after this long.
inline constexpr std::chrono::seconds kWatchdog{20};

inline void on_ranks(int n, const std::function<void(int)>& body) {
  run_ranks(n, body, {.timeout = kWatchdog});
}

/// Random numbers of their own seed: the global generator is shared by ranks that are threads.
class Random {
 public:
  explicit Random(std::uint64_t seed)
      : generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  at::Tensor normal(at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
    return at::randn(sizes, generator_, at::TensorOptions(at::kDouble)).to(type);
  }
  at::Tensor classes(std::int64_t n_classes, std::int64_t n) {
    return at::randint(0, n_classes, {n}, generator_, at::TensorOptions(at::kLong));
  }

 private:
  at::Generator generator_;
};

inline double largest(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : tensor.abs().max().item<double>();
}

/// Largest absolute difference; infinite where only one has a value.
inline double difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return std::numeric_limits<double>::infinity();
  if (!a.defined()) return 0;
  const at::NoGradGuard no_grad;
  return largest(a.detach().to(at::kDouble) - b.detach().to(at::kDouble));
}

/// The text of the UsageError that f throws.
template <class F>
std::string usage_error(F f) {
  try {
    f();
  } catch (const UsageError& error) {
    return error.text();
  }
  return "no error";
}

/// Samples per rank.
using Shares = std::vector<std::int64_t>;

/// Part `rank` of a batch that is cut by rows into shares.
inline at::Tensor share_of(const at::Tensor& batch, std::span<const std::int64_t> shares,
                           int rank) {
  std::int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += shares[static_cast<std::size_t>(r)];
  return batch.narrow(0, start, shares[static_cast<std::size_t>(rank)]);
}

/// The same values, channels last in memory: of any number of dimensions.
inline at::Tensor channels_last(const at::Tensor& tensor) {
  return tensor.movedim(1, -1).contiguous().movedim(-1, 1);
}
inline bool is_channels_last(const at::Tensor& tensor) {
  return tensor.movedim(1, -1).is_contiguous();
}
/// The same values, every second element of a larger tensor.
inline at::Tensor strided(const at::Tensor& tensor) {
  return at::stack({tensor, tensor}, -1).select(-1, 1);
}

/// Output, gradients and running statistics of a batch normalisation after two steps.
template <class Holder>
std::vector<at::Tensor> outcome_of(Holder& bn, const at::Tensor& x, const at::Tensor& dy) {
  at::Tensor y;
  const at::Tensor leaf = x.detach().requires_grad_();
  for (int step = 0; step < 2; ++step) {
    bn->zero_grad();
    leaf.mutable_grad().reset();
    y = bn->forward(leaf);
    y.backward(dy);
  }
  return {y, leaf.grad(), bn->weight.grad(), bn->bias.grad(), bn->running_mean, bn->running_var};
}

}  // namespace lockstep::nn::testing
