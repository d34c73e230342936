// The weight gradient of F(4x4, 3x3) on the CPU, for the tests: transforms in FP32, sums over the tiles in FP64, which
// also have the range that the transformed operands need.
#include <algorithm>
#include <vector>

#include "algos/winograd_staged/wgrad/plan.h"
#include "core/kernels.h"
#include "device/indexing.h"
#include "winograd/matrices.h"

namespace fastconv {
namespace algos::winograd_staged::wgrad {
namespace {

// [size][size] to [6][6], columns first. line: a transform of one dimension.
template <int size, typename Line>
void transform_tile(const float (&tile)[size][size], float (&result)[alpha][alpha], const Line& line) {
  float columns[alpha][size];
  for (int j = 0; j < size; ++j) {
    float values[size], transformed[alpha];
    for (int i = 0; i < size; ++i) values[i] = tile[i][j];
    line(values, transformed);
    for (int i = 0; i < alpha; ++i) columns[i][j] = transformed[i];
  }
  for (int i = 0; i < alpha; ++i) line(columns[i], result[i]);
}

// The tile of x or dy with its corner at (h0, w0), zeros outside.
template <int size>
void read_tile(const float* image, const Strides4& strides, std::int64_t channel, std::int64_t h0, std::int64_t w0,
               std::int64_t h, std::int64_t w, float (&tile)[size][size]) {
  for (int i = 0; i < size; ++i) {
    for (int j = 0; j < size; ++j) {
      const bool inside = h0 + i >= 0 && h0 + i < h && w0 + j >= 0 && w0 + j < w;
      tile[i][j] = inside ? image[strides(0, channel, h0 + i, w0 + j)] : 0.0f;
    }
  }
}

void run(const WeightGradientArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Plan& plan = plan_as<Plan>(args.kernel_plan);
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto* x = static_cast<const float*>(args.x);
  const auto* grad = static_cast<const float*>(args.grad);
  auto* dw = static_cast<float*>(args.dw);
  auto* v = static_cast<float*>(args.workspace);  // [tiles][36][C]
  const std::int64_t channels = problem.c;

  struct Position {
    std::int64_t n, h, w;
  };
  const auto position = [&](std::int64_t tile) {
    const std::int64_t row = tile / plan.tiles_q;
    return Position{row / plan.tiles_p, row % plan.tiles_p * m, tile % plan.tiles_q * m};
  };
  runtime.parallel_for(0, plan.tiles, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const Position at = position(tile);
      for (std::int64_t c = 0; c < channels; ++c) {
        float d[alpha][alpha], result[alpha][alpha];
        read_tile(x + at.n * in.n, in, c, at.h - problem.pad_h, at.w - problem.pad_w, problem.h, problem.w, d);
        transform_tile(d, result, [](const auto& values, auto& line) { winograd::Transform<m>::input(values, line); });
        for (int f = 0; f < points; ++f) v[(tile * points + f) * channels + c] = result[f / alpha][f % alpha];
      }
    }
  });
  runtime.parallel_for(0, problem.k, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> sums;  // [36][C]
    for (std::int64_t k = begin; k < end; ++k) {
      sums.assign(static_cast<std::size_t>(points * channels), 0.0);
      for (std::int64_t tile = 0; tile < plan.tiles; ++tile) {
        const Position at = position(tile);
        float dy[m][m], w[alpha][alpha];
        read_tile(grad + at.n * out.n, out, k, at.h, at.w, problem.p(), problem.q(), dy);
        transform_tile(dy, w,
                       [](const auto& values, auto& line) { winograd::Transform<m>::output_transposed(values, line); });
        const float* row = v + tile * points * channels;
        for (int f = 0; f < points; ++f) {
          const double factor = w[f / alpha][f % alpha];
          double* sum = sums.data() + f * channels;
          for (std::int64_t c = 0; c < channels; ++c) sum[c] += factor * row[f * channels + c];
        }
      }
      for (std::int64_t c = 0; c < channels; ++c) {
        double rows[3][alpha];
        for (int j = 0; j < alpha; ++j) {
          double line[alpha], result[3];
          for (int i = 0; i < alpha; ++i) line[i] = sums[static_cast<std::size_t>((i * alpha + j) * channels + c)];
          winograd::Transform<m>::filter_transposed(line, result);
          for (int i = 0; i < 3; ++i) rows[i][j] = result[i];
        }
        for (int i = 0; i < 3; ++i) {
          double result[3];
          winograd::Transform<m>::filter_transposed(rows[i], result);
          for (int j = 0; j < 3; ++j) {
            const std::int64_t tap = 3 * i + j, at = args.channels_last ? tap * channels + c : c * 9 + tap;
            dw[k * channels * 9 + at] = static_cast<float>(result[j]);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace algos::winograd_staged::wgrad

namespace algos::winograd_f4 {

void weight_gradient_cpu(const WeightGradientArgs& args, Runtime& runtime) {
  winograd_staged::wgrad::run(args, runtime);
}

}  // namespace algos::winograd_f4
}  // namespace fastconv
