#include <ATen/ATen.h>

#include <cmath>
#include <lockstep/error.hpp>
#include <lockstep/trace.hpp>
#include <span>
#include <vector>

#include "nn/batch_norm/layer_steps.hpp"

/// The backward of the backward of a batch normalisation: all in doubles, by ATen's operators.
///
/// Of each channel, with the mean m() over the batch of all ranks, h the normalised input, s its
/// invstd, g the weight, A = m(dy), B = m(dy h), the backward is
///     dx = g s (dy - A - h B),   dg = sum of this piece's dy h,   db = sum of this piece's dy.
/// With v, u, w the gradients of dx, dg, db, D = m(v h) and e = u dy - g s (v B + dy D), which is
/// the gradient of h, the sum of v dx + u dg + w db has the gradients
///     of dy: g s (v - m(v) - h D) + u h + w
///     of x:  s (e - m(e) - h m(e h)) - g s^2 h (m(v dy) - m(v) A - B D)
///     of g:  s times the sum of this piece's v (dy - A - h B).
/// (The last term of x's is that of the factor s.)
/// So the message has m(v), m(v h), m(v dy), m(u dy) and m(u dy h). A clamped variance is constant:
/// then B, D, m(e h) and the last term are 0.
namespace lockstep::nn {
namespace {

using at::Tensor;

enum Sum : std::int64_t { v, v_h, v_dy, u_dy, u_dy_h, kSums };

/// One value for each channel, as a factor of x's elements.
Tensor as_channels(const Tensor& values, const Tensor& x) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[1] = x.size(1);
  return values.to(x.device()).view(sizes);
}

Tensor sum_of_channels(const Tensor& values) {
  std::vector<std::int64_t> dims{0};
  for (std::int64_t i = 2; i < values.dim(); ++i) dims.push_back(i);
  return values.sum(dims).cpu();
}

struct Piece {
  Tensor dy, h, gradient_of_dx;       ///< doubles in x's shape; the last undefined if there is none
  Tensor weight, of_weight, of_bias;  ///< C doubles on the CPU; 1, 0, 0 if there is none
  Tensor sums = Tensor();             ///< kSums x C doubles on the CPU, of this piece alone

  Piece(const BatchNormSecondPiece& piece, const Tensor& mean, const Tensor& invstd)
      : dy(piece.inputs[0].to(at::kDouble)) {
    const auto channels = [&](const Tensor& values, double otherwise) {
      return values.defined() ? values.to(at::kCPU, at::kDouble)
                              : at::full({mean.size(0)}, otherwise, at::kDouble);
    };
    const Tensor x = piece.inputs[1].to(at::kDouble);
    h = (x - as_channels(mean, x)) * as_channels(invstd, x);
    weight = channels(piece.inputs[2], 1);
    of_weight = channels(piece.gradients.weight, 0);
    of_bias = channels(piece.gradients.bias, 0);
    if (!piece.gradients.input.defined()) return;
    gradient_of_dx = piece.gradients.input.to(at::kDouble);
    sums = at::stack({sum_of_channels(gradient_of_dx), sum_of_channels(gradient_of_dx * h),
                      sum_of_channels(gradient_of_dx * dy), of_weight * sum_of_channels(dy),
                      of_weight * sum_of_channels(dy * h)});
  }
};

}  // namespace

std::vector<std::array<Tensor, 3>> batch_norm_second_backward(
    std::span<const BatchNormSecondPiece> pieces, const BatchNormRecord& record,
    const Tensor& means) {
  const TraceScope scope("SyncBatchNorm second backward");
  const BatchNormSettings& settings = record.settings;
  const auto run = [&] {
    refuse_create_graph(kSecondBackward, settings.layer,
                        "third gradients are not supported: take the second ones without "
                        "create_graph");
    const auto [mean, invstd] = mean_and_invstd(record.statistics);
    std::vector<Piece> all;
    for (const BatchNormSecondPiece& piece : pieces) all.emplace_back(piece, mean, invstd);
    std::vector<std::array<Tensor, 3>> results(pieces.size());
    const auto give = [&](std::size_t i, std::size_t kind, const auto& compute) {
      if (pieces[i].wanted[kind]) results[i][kind] = compute().to(pieces[i].inputs[kind].options());
    };
    if (!means.defined()) {  // the gradients of weight and bias alone, which are this rank's sums
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const Tensor& dy = all[i].dy;
        give(i, 0, [&] {
          return as_channels(all[i].of_weight, dy) * all[i].h + as_channels(all[i].of_bias, dy);
        });
      }
      return results;
    }

    Tensor message = all.front().sums.clone();
    for (std::size_t i = 1; i < all.size(); ++i) message = message + all[i].sums;
    settings.layer.all_reduce(
        kSecondBackward,
        {message.data_ptr(), static_cast<std::size_t>(message.numel()), DType::f64}, ReduceOp::sum);
    if (const double count = data(record.statistics)[0]; count > 0) message.div_(count);
    const Tensor varies = settings.eps_mode == EpsMode::clamp
                              ? invstd.ne(1 / std::sqrt(settings.eps)).to(at::kDouble)
                              : at::ones_like(invstd);
    const std::int64_t c = mean.size(0);
    const Tensor a = means.narrow(0, 0, c), b = means.narrow(0, c, c) * invstd;
    const Tensor d = message[v_h] * varies;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Piece& mine = all[i];
      const auto each = [&](const Tensor& values) { return as_channels(values, mine.dy); };
      const Tensor g_s = mine.weight * invstd;
      give(i, 0, [&] {
        return each(g_s) * (mine.gradient_of_dx - each(message[v]) - mine.h * each(d)) +
               each(mine.of_weight) * mine.h + each(mine.of_bias);
      });
      give(i, 1, [&] {
        const Tensor e = each(mine.of_weight) * mine.dy - each(g_s * b) * mine.gradient_of_dx -
                         each(g_s * d) * mine.dy;
        const Tensor mean_e = message[u_dy] - g_s * (message[v] * b + a * d);
        const Tensor mean_e_h = (message[u_dy_h] - 2 * g_s * b * d) * varies;
        const Tensor of_s = g_s * (message[v_dy] - message[v] * a - b * d) * varies;
        return each(invstd) * (e - each(mean_e) - mine.h * each(mean_e_h + of_s));
      });
      give(i, 2,
           [&] { return invstd * (mine.sums[v_dy] - a * mine.sums[v] - b * mine.sums[v_h]); });
    }
    return results;
  };
  return means.defined() ? settings.layer.guard(run) : run();
}

}  // namespace lockstep::nn
