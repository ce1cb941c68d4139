// The one body of batch_norm.hpp, included once per instruction set with LOCKSTEP_ISA naming its
// namespace. As in reduce_body.hpp: internal linkage, no call of an inline function from elsewhere.
//
// Two walks over x[outer][channels][inner]:
// - runs, for inner >= kLanes: along the runs of `inner` values of a few adjoining channels, sums
//   kept in kLanes lanes however wide the registers are.
// - rows, for shorter inner: positions of a row side by side, each with its own sums. Where a row
//   is short, k rows are taken as one; several positions then belong to one channel.
// Both give the same bits on every instruction set.
//
// Statistics are sums of d and d^2 with d = x - pivot, in double, over blocks; the pivot is the
// mean so far (at first, of a few values: the very first may lie far from the rest), so that the
// sums of a block lose nothing to cancellation. Blocks are merged as in
// Chan, Golub, LeVeque 1979. The mean is kept as its distance from the channel's first value and
// rounded once, at the end.

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels/batch_norm_isa.hpp"

#if defined(__clang__)
#define LOCKSTEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define LOCKSTEP_UNROLL _Pragma("unroll")
#else
#define LOCKSTEP_INDEPENDENT _Pragma("GCC ivdep")
#define LOCKSTEP_UNROLL _Pragma("GCC unroll 16")
#endif

#define LOCKSTEP_INLINE [[gnu::always_inline]] static inline

namespace lockstep::kernels::LOCKSTEP_ISA {
namespace {

using Index = std::size_t;

constexpr Index kLanes = 16;
constexpr Index kRunBlock = 4096;  // values between two merges
constexpr Index kRunTile = 64;     // channels side by side, at most: their lanes stay in L1
constexpr Index kRowBlock = 128;   // rows between two merges
constexpr Index kRowStart = 8;     // rows of the first guess of the mean
constexpr Index kWidth = 512;      // positions side by side: their sums stay in L1

constexpr Index min_of(Index a, Index b) { return a < b ? a : b; }
constexpr Index max_of(Index a, Index b) { return a > b ? a : b; }

double finite_or_zero(double x) { return x - x == 0 ? x : 0; }
double not_negative(double x) { return x < 0 ? 0 : x; }  // keeps a NaN

/// A mean as base + offset, where `base` is known from elsewhere.
struct Moments {
  double count = 0;
  double offset = 0;
  double m2 = 0;

  void merge(double part_count, double part_offset, double part_m2) {
    const double share = part_count / (count + part_count);
    const double delta = part_offset - offset;
    offset += delta * share;
    m2 += part_m2 + delta * delta * (count * share);
    count += part_count;
  }
};

// --- runs ---------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr Index kDoubles = 8;  // of one register
#elif defined(__AVX2__)
constexpr Index kDoubles = 4;
#else
constexpr Index kDoubles = 2;
#endif
constexpr Index kRegisters = kLanes / kDoubles;

typedef double Doubles __attribute__((vector_size(kDoubles * sizeof(double))));

struct TwoSums {
  double first = 0;
  double second = 0;
};

/// Two sums of a channel, in lanes.
struct Lanes {
  Doubles first[kRegisters];
  Doubles second[kRegisters];

  TwoSums total() const { return {total_of(first), total_of(second)}; }

 private:
  static double total_of(const Doubles* registers) {
    double lane[kLanes];
    __builtin_memcpy(lane, registers, sizeof(lane));
    for (Index half = kLanes / 2; half > 0; half /= 2) {
      for (Index i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
  }
};

LOCKSTEP_INLINE Doubles load(const double* x) {
  Doubles values;
  __builtin_memcpy(&values, x, sizeof(values));
  return values;
}

LOCKSTEP_INLINE Doubles load(const float* x) {
  typedef float Floats __attribute__((vector_size(kDoubles * sizeof(float))));
  Floats values;
  __builtin_memcpy(&values, x, sizeof(values));
// By name, for the reasons in reduce_body.hpp.
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)values);
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd((__m128)values);
#else
  return __builtin_convertvector(values, Doubles);
#endif
}

/// The last, fewer than kLanes values of a run, and `filler` after them.
template <class T>
LOCKSTEP_INLINE void fill_lanes(const T* x, Index length, double filler, double* lane) {
  for (Index i = 0; i < kLanes; ++i) lane[i] = filler;
  for (Index i = 0; i < length; ++i) lane[i] = static_cast<double>(x[i]);
}

/// Adds d and d^2 of a run, d = x - pivot.
template <class T>
LOCKSTEP_INLINE void add_powers_of_run(const T* x, Index length, double pivot, Lanes& sums) {
  Lanes s = sums;
  const auto add = [&](const auto* values) {
    LOCKSTEP_UNROLL
    for (Index r = 0; r < kRegisters; ++r) {
      const Doubles d = load(values + r * kDoubles) - pivot;
      s.first[r] += d;
      s.second[r] += d * d;
    }
  };
  Index i = 0;
  for (; i + kLanes <= length; i += kLanes) add(x + i);
  if (i < length) {
    double lane[kLanes];
    fill_lanes(x + i, length - i, pivot, lane);
    add(lane);
  }
  sums = s;
}

/// Adds dy and dy * (x - mean) of a run.
template <class T>
LOCKSTEP_INLINE void add_products_of_run(const T* dy, const T* x, Index length, double mean,
                                         Lanes& sums) {
  Lanes s = sums;
  const auto add = [&](const auto* gradients, const auto* values) {
    LOCKSTEP_UNROLL
    for (Index r = 0; r < kRegisters; ++r) {
      const Doubles g = load(gradients + r * kDoubles);
      s.first[r] += g;
      s.second[r] += g * (load(values + r * kDoubles) - mean);
    }
  };
  Index i = 0;
  for (; i + kLanes <= length; i += kLanes) add(dy + i, x + i);
  if (i < length) {
    double lane_dy[kLanes];
    double lane_x[kLanes];
    fill_lanes(dy + i, length - i, 0, lane_dy);
    fill_lanes(x + i, length - i, mean, lane_x);
    add(lane_dy, lane_x);
  }
  sums = s;
}

/// Calls add(c, at, length, lanes of c) for every run of a block, c counting from the tile's first
/// channel, and then end_of(c, number of values, their sums), block by block. The channels of a
/// tile adjoin in memory, and short runs alone would defeat the prefetcher.
template <class Add, class EndOf>
void for_each_run_of_tile(BatchNormShape shape, Index channel, Index n_channels, Add add,
                          EndOf end_of) {
  Lanes lanes[kRunTile];
  const Index samples_per_block = max_of(1, kRunBlock / shape.inner);
  for (Index sample = 0; sample < shape.outer; sample += samples_per_block) {
    const Index n_samples = min_of(samples_per_block, shape.outer - sample);
    for (Index begin = 0; begin < shape.inner; begin += kRunBlock) {
      const Index length = min_of(kRunBlock, shape.inner - begin);
      for (Index c = 0; c < n_channels; ++c) lanes[c] = Lanes{};
      for (Index n = sample; n < sample + n_samples; ++n) {
        for (Index c = 0; c < n_channels; ++c) {
          const Index run = n * shape.channels + channel + c;
          add(c, run * shape.inner + begin, length, lanes[c]);
        }
      }
      for (Index c = 0; c < n_channels; ++c) {
        end_of(c, static_cast<double>(n_samples * length), lanes[c].total());
      }
    }
  }
}

/// Calls visit(first channel, number of channels) for tiles of about kRunBlock adjoining values.
template <class Visit>
void for_each_run_tile(BatchNormShape shape, Visit visit) {
  const Index most = min_of(kRunTile, max_of(1, kRunBlock / shape.inner));
  for (Index c = 0; c < shape.channels; c += most) visit(c, min_of(most, shape.channels - c));
}

template <class T>
void stats_runs(const T* x, BatchNormShape shape, double* mean, double* m2) {
  for_each_run_tile(shape, [&](Index channel, Index n_channels) {
    double base[kRunTile];
    double pivot[kRunTile];
    Moments moments[kRunTile];
    for (Index c = 0; c < n_channels; ++c) {
      const T* first = x + (channel + c) * shape.inner;
      base[c] = finite_or_zero(static_cast<double>(*first));
      Lanes start{};
      add_powers_of_run(first, kLanes, base[c], start);
      moments[c].offset = start.total().first / static_cast<double>(kLanes);
      pivot[c] = finite_or_zero(base[c] + moments[c].offset);
    }
    for_each_run_of_tile(
        shape, channel, n_channels,
        [&](Index c, Index at, Index length, Lanes& lanes) {
          add_powers_of_run(x + at, length, pivot[c], lanes);
        },
        [&](Index c, double count, TwoSums sums) {
          const double distance = sums.first / count;
          moments[c].merge(count, (pivot[c] - base[c]) + distance,
                           not_negative(sums.second - sums.first * distance));
          pivot[c] = finite_or_zero(base[c] + moments[c].offset);
        });
    for (Index c = 0; c < n_channels; ++c) {
      mean[channel + c] = base[c] + moments[c].offset;
      m2[channel + c] = moments[c].m2;
    }
  });
}

template <class T>
void backward_reduce_runs(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                          double* sum_dy, double* sum_dy_xmu) {
  for_each_run_tile(shape, [&](Index channel, Index n_channels) {
    TwoSums total[kRunTile];
    for_each_run_of_tile(
        shape, channel, n_channels,
        [&](Index c, Index at, Index length, Lanes& lanes) {
          add_products_of_run(dy + at, x + at, length, mean[channel + c], lanes);
        },
        [&](Index c, double /*count*/, TwoSums sums) {
          total[c].first += sums.first;
          total[c].second += sums.second;
        });
    for (Index c = 0; c < n_channels; ++c) {
      sum_dy[channel + c] = total[c].first;
      sum_dy_xmu[channel + c] = total[c].second;
    }
  });
}

// --- rows ---------------------------------------------------------------------------------------

/// Some channels of all rows: `fold` rows of n_channels * inner positions taken as one. fold > 1
/// only where the tile has every channel, so that the rows adjoin.
struct Tile {
  Index channel = 0;
  Index n_channels = 0;
  Index inner = 0;
  Index fold = 1;

  Index width() const { return fold * n_channels * inner; }
  Index channel_of(Index position) const { return channel + position / inner % n_channels; }
};

/// Calls visit(tile) for tiles of at most kWidth positions; `wanted` is the width up to which
/// rows are taken together.
template <class Visit>
void for_each_tile(BatchNormShape shape, Index wanted, Visit visit) {
  const Index most = max_of(1, kWidth / shape.inner);
  for (Index c = 0; c < shape.channels; c += most) {
    Tile tile{c, min_of(most, shape.channels - c), shape.inner, 1};
    if (tile.n_channels == shape.channels) {
      tile.fold = max_of(1, min_of(wanted / tile.width(), shape.outer));
    }
    visit(tile);
  }
}

/// Adds one row (first or next) of each position's d and d^2.
template <class T>
void add_powers(const T* x, Index n_rows, Index stride, Index width, const double* pivot,
                double* first, double* second) {
  Index row = 0;
  for (; row + 4 <= n_rows; row += 4, x += 4 * stride) {
    LOCKSTEP_INDEPENDENT
    for (Index p = 0; p < width; ++p) {
      const double d0 = static_cast<double>(x[p]) - pivot[p];
      const double d1 = static_cast<double>(x[stride + p]) - pivot[p];
      const double d2 = static_cast<double>(x[2 * stride + p]) - pivot[p];
      const double d3 = static_cast<double>(x[3 * stride + p]) - pivot[p];
      first[p] += (d0 + d1) + (d2 + d3);
      second[p] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
    }
  }
  for (; row < n_rows; ++row, x += stride) {
    LOCKSTEP_INDEPENDENT
    for (Index p = 0; p < width; ++p) {
      const double d = static_cast<double>(x[p]) - pivot[p];
      first[p] += d;
      second[p] += d * d;
    }
  }
}

/// offset and m2 of each position over n_rows rows.
template <class T>
void stats_of_positions(const T* x, Index n_rows, Index stride, Index width, const double* base,
                        double* offset, double* m2) {
  alignas(64) double pivot[kWidth];
  alignas(64) double first[kWidth];
  alignas(64) double second[kWidth];
  for (Index p = 0; p < width; ++p) first[p] = second[p] = 0;
  const Index n_start = min_of(kRowStart, n_rows);
  add_powers(x, n_start, stride, width, base, first, second);
  for (Index p = 0; p < width; ++p) {
    offset[p] = first[p] / static_cast<double>(n_start);
    m2[p] = 0;
  }
  for (Index row = 0; row < n_rows; row += kRowBlock) {
    const Index n = min_of(kRowBlock, n_rows - row);
    for (Index p = 0; p < width; ++p) {
      pivot[p] = finite_or_zero(base[p] + offset[p]);
      first[p] = second[p] = 0;
    }
    add_powers(x + row * stride, n, stride, width, pivot, first, second);
    const double per_count = 1 / static_cast<double>(n);
    const double share = static_cast<double>(n) / static_cast<double>(row + n);
    const double spread = static_cast<double>(row) * share;
    for (Index p = 0; p < width; ++p) {
      const double distance = first[p] * per_count;
      const double delta = (pivot[p] - base[p]) + distance - offset[p];
      offset[p] += delta * share;
      m2[p] += not_negative(second[p] - first[p] * distance) + delta * delta * spread;
    }
  }
}

template <class T>
void stats_rows(const T* x, BatchNormShape shape, double* mean, double* m2) {
  for_each_tile(shape, /*wanted=*/64, [&](const Tile& tile) {
    const T* start = x + tile.channel * tile.inner;
    const Index row = shape.channels * tile.inner;
    const Index width = tile.width();
    const Index n_rows = shape.outer / tile.fold;
    const Index n_left = shape.outer % tile.fold;
    const Index one = tile.n_channels * tile.inner;
    alignas(64) double base[kWidth];
    alignas(64) double offset[kWidth];
    alignas(64) double square[kWidth];
    alignas(64) double left_offset[kWidth];
    alignas(64) double left_square[kWidth];
    for (Index p = 0; p < width; ++p) {
      base[p] = finite_or_zero(
          static_cast<double>(start[(tile.channel_of(p) - tile.channel) * tile.inner]));
    }
    stats_of_positions(start, n_rows, tile.fold * row, width, base, offset, square);
    if (n_left > 0) {
      stats_of_positions(start + n_rows * tile.fold * row, n_left, row, one, base, left_offset,
                         left_square);
    }
    for (Index c = 0; c < tile.n_channels; ++c) {
      Moments moments;
      for (Index k = 0; k < tile.fold; ++k) {
        for (Index p = k * one + c * tile.inner; p < k * one + (c + 1) * tile.inner; ++p) {
          moments.merge(static_cast<double>(n_rows), offset[p], square[p]);
        }
      }
      for (Index p = c * tile.inner; n_left > 0 && p < (c + 1) * tile.inner; ++p) {
        moments.merge(static_cast<double>(n_left), left_offset[p], left_square[p]);
      }
      mean[tile.channel + c] = base[c * tile.inner] + moments.offset;
      m2[tile.channel + c] = moments.m2;
    }
  });
}

template <class T>
void add_products(const T* dy, const T* x, Index n_rows, Index stride, Index width,
                  const double* mean, double* first, double* second) {
  for (Index row = 0; row < n_rows; ++row, x += stride, dy += stride) {
    LOCKSTEP_INDEPENDENT
    for (Index p = 0; p < width; ++p) {
      const auto g = static_cast<double>(dy[p]);
      first[p] += g;
      second[p] += g * (static_cast<double>(x[p]) - mean[p]);
    }
  }
}

template <class T>
void backward_reduce_rows(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                          double* sum_dy, double* sum_dy_xmu) {
  for_each_tile(shape, /*wanted=*/64, [&](const Tile& tile) {
    const Index row = shape.channels * tile.inner;
    const Index width = tile.width();
    const Index one = tile.n_channels * tile.inner;
    alignas(64) double centre[kWidth];
    alignas(64) double first[kWidth];
    alignas(64) double second[kWidth];
    alignas(64) double total_first[kWidth];
    alignas(64) double total_second[kWidth];
    for (Index p = 0; p < width; ++p) {
      centre[p] = mean[tile.channel_of(p)];
      total_first[p] = total_second[p] = 0;
    }
    const Index n_rows = shape.outer / tile.fold;
    const Index n_left = shape.outer % tile.fold;
    Index at = tile.channel * tile.inner;
    for (Index done = 0; done < n_rows; done += kRowBlock) {
      const Index n = min_of(kRowBlock, n_rows - done);
      for (Index p = 0; p < width; ++p) first[p] = second[p] = 0;
      add_products(dy + at, x + at, n, tile.fold * row, width, centre, first, second);
      at += n * tile.fold * row;
      for (Index p = 0; p < width; ++p) {
        total_first[p] += first[p];
        total_second[p] += second[p];
      }
    }
    add_products(dy + at, x + at, n_left, row, one, centre, total_first, total_second);
    for (Index c = 0; c < tile.n_channels; ++c) {
      TwoSums sums;
      for (Index k = 0; k < tile.fold; ++k) {
        for (Index p = k * one + c * tile.inner; p < k * one + (c + 1) * tile.inner; ++p) {
          sums.first += total_first[p];
          sums.second += total_second[p];
        }
      }
      sum_dy[tile.channel + c] = sums.first;
      sum_dy_xmu[tile.channel + c] = sums.second;
    }
  });
}

// --- elementwise --------------------------------------------------------------------------------

/// A double as the sum of two T: x - high - low keeps what x - mean in float would lose.
template <class T>
struct Split {
  T high;
  T low;
  explicit Split(double value)
      : high(static_cast<T>(value)), low(static_cast<T>(value - static_cast<double>(high))) {
    if (!(low - low == 0)) low = 0;  // an infinity or a NaN is in `high` already
  }
};

/// y = ((x - mean) * scale) + shift
template <class T>
struct Normalize {
  static constexpr int kParameters = 4;

  const double* mean;
  const double* invstd;
  const T* weight;
  const T* bias;

  void parameters(Index c, T* into) const {
    const Split<T> m(mean[c]);
    into[0] = m.high;
    into[1] = m.low;
    into[2] = static_cast<T>(invstd[c] * (weight != nullptr ? static_cast<double>(weight[c]) : 1));
    into[3] = bias != nullptr ? bias[c] : T(0);
  }
  static T apply(T x, T /*unused*/, const T* p) { return ((x - p[0]) - p[1]) * p[2] + p[3]; }
};

/// dx = ((dy - mean_dy) - (x - mean) * slope) * scale
template <class T>
struct BackwardElementwise {
  static constexpr int kParameters = 6;

  const double* mean;
  const double* invstd;
  const T* weight;
  const double* mean_dy;
  const double* mean_dy_xmu;

  void parameters(Index c, T* into) const {
    const Split<T> m(mean[c]);
    const Split<T> g(mean_dy[c]);
    into[0] = m.high;
    into[1] = m.low;
    into[2] = g.high;
    into[3] = g.low;
    into[4] = static_cast<T>(invstd[c] * invstd[c] * mean_dy_xmu[c]);
    into[5] = static_cast<T>(invstd[c] * (weight != nullptr ? static_cast<double>(weight[c]) : 1));
  }
  static T apply(T x, T dy, const T* p) {
    return (((dy - p[2]) - p[3]) - ((x - p[0]) - p[1]) * p[4]) * p[5];
  }
};

/// out = f.apply(x, dy, parameters of the channel). `out` may be x or dy.
template <class T, class F>
void elementwise_runs(const T* x, const T* dy, BatchNormShape shape, const F& f, T* out) {
  for (Index n = 0; n < shape.outer; ++n) {
    for (Index c = 0; c < shape.channels; ++c) {
      T p[F::kParameters];
      f.parameters(c, p);
      const Index at = (n * shape.channels + c) * shape.inner;
      LOCKSTEP_INDEPENDENT
      for (Index i = at; i < at + shape.inner; ++i) out[i] = F::apply(x[i], dy[i], p);
    }
  }
}

template <class T, class F>
void elementwise_rows(const T* x, const T* dy, BatchNormShape shape, const F& f, T* out) {
  for_each_tile(shape, /*wanted=*/kWidth, [&](const Tile& tile) {
    const Index row = shape.channels * tile.inner;
    alignas(64) T parameters[F::kParameters][kWidth];
    const Index width = tile.width();
    for (Index p = 0; p < width; ++p) {
      T one[F::kParameters];
      f.parameters(tile.channel_of(p), one);
      for (int k = 0; k < F::kParameters; ++k) parameters[k][p] = one[k];
    }
    for (Index n = 0; n < shape.outer; n += tile.fold) {
      const Index at = n * row + tile.channel * tile.inner;
      const Index length = min_of(tile.fold, shape.outer - n) * tile.n_channels * tile.inner;
      LOCKSTEP_INDEPENDENT
      for (Index p = 0; p < length; ++p) {
        T one[F::kParameters];
        for (int k = 0; k < F::kParameters; ++k) one[k] = parameters[k][p];
        out[at + p] = F::apply(x[at + p], dy[at + p], one);
      }
    }
  });
}

// --- the functions of the table -----------------------------------------------------------------

/// One channel is one run.
BatchNormShape simplified(BatchNormShape shape) {
  if (shape.channels == 1) return {1, 1, shape.outer * shape.inner};
  return shape;
}

template <class T>
void stats(const T* x, BatchNormShape shape, double* mean, double* m2) {
  if (shape.outer * shape.inner == 0) {
    for (Index c = 0; c < shape.channels; ++c) mean[c] = m2[c] = 0;
    return;
  }
  shape = simplified(shape);
  shape.inner >= kLanes ? stats_runs(x, shape, mean, m2) : stats_rows(x, shape, mean, m2);
}

template <class T>
void backward_reduce(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                     double* sum_dy, double* sum_dy_xmu) {
  if (shape.outer * shape.inner == 0) {
    for (Index c = 0; c < shape.channels; ++c) sum_dy[c] = sum_dy_xmu[c] = 0;
    return;
  }
  shape = simplified(shape);
  shape.inner >= kLanes ? backward_reduce_runs(dy, x, shape, mean, sum_dy, sum_dy_xmu)
                        : backward_reduce_rows(dy, x, shape, mean, sum_dy, sum_dy_xmu);
}

template <class T, class F>
void elementwise(const T* x, const T* dy, BatchNormShape shape, const F& f, T* out) {
  if (shape.outer * shape.inner == 0) return;
  shape = simplified(shape);
  shape.inner >= kLanes ? elementwise_runs(x, dy, shape, f, out)
                        : elementwise_rows(x, dy, shape, f, out);
}

template <class T>
void normalize(const T* x, BatchNormShape shape, const double* mean, const double* invstd,
               const T* weight, const T* bias, T* y) {
  elementwise(x, /*dy=*/x, shape, Normalize<T>{mean, invstd, weight, bias}, y);
}

template <class T>
void backward_elementwise(const T* dy, const T* x, BatchNormShape shape, const double* mean,
                          const double* invstd, const T* weight, const double* mean_dy,
                          const double* mean_dy_xmu, T* dx) {
  elementwise(x, dy, shape, BackwardElementwise<T>{mean, invstd, weight, mean_dy, mean_dy_xmu}, dx);
}

}  // namespace

const BatchNormTable<float> kBatchNormFloat = {stats<float>, normalize<float>,
                                               backward_reduce<float>, backward_elementwise<float>};
const BatchNormTable<double> kBatchNormDouble = {
    stats<double>, normalize<double>, backward_reduce<double>, backward_elementwise<double>};

#undef LOCKSTEP_INDEPENDENT
#undef LOCKSTEP_UNROLL
#undef LOCKSTEP_INLINE

}  // namespace lockstep::kernels::LOCKSTEP_ISA
