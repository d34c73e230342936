// The same sums in FP32 arithmetic: for each tile of four outputs, rows of U times one value of V.
#include <algorithm>
#include <vector>

#include "algos/winograd_fused/plan.h"
#include "core/kernels.h"
#include "device/epilogue.h"
#include "device/indexing.h"
#include "host/pack.h"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_fused {
namespace {

using Transform = winograd::Transform<4>;
constexpr std::int64_t filter_block = 32, channel_block = 64;

// V of one tile: [r][f][C], zeros outside the image.
template <typename T>
void transform_input(const ConvProblem& problem, const Strides4& in, const T* x, std::int64_t n, std::int64_t p,
                     std::int64_t q0, float* v) {
  for (std::int64_t r = 0; r < taps; ++r) {
    const std::int64_t h = p + r - problem.pad_h;
    for (std::int64_t c = 0; c < problem.c; ++c) {
      float d[points] = {}, result[points];
      for (std::int64_t j = 0; j < points; ++j) {
        const std::int64_t w = q0 + j - problem.pad_w;
        if (h >= 0 && h < problem.h && w >= 0 && w < problem.w) d[j] = to_float(x[in(n, c, h, w)]);
      }
      Transform::input(d, result);
      for (std::int64_t f = 0; f < points; ++f) v[(r * points + f) * problem.c + c] = result[f];
    }
  }
}

// M[f][k] of one tile for filters k0 and on.
void multiply(const ConvProblem& problem, const float* u, const float* v, std::int64_t k0, std::int64_t count,
              float (&m)[points][filter_block]) {
  for (std::int64_t f = 0; f < points; ++f) {
    std::fill(m[f], m[f] + filter_block, 0.0f);
    for (std::int64_t r = 0; r < taps; ++r) {
      const std::int64_t row = (r * points + f) * problem.c;
      for (std::int64_t c0 = 0; c0 < problem.c; c0 += channel_block) {
        float sum[filter_block] = {};  // sums of sums round less than one long chain
        for (std::int64_t c = c0; c < std::min(c0 + channel_block, problem.c); ++c) {
          const float* filters = u + (row + c) * problem.k + k0;
          for (std::int64_t k = 0; k < count; ++k) sum[k] += v[row + c] * filters[k];
        }
        for (std::int64_t k = 0; k < count; ++k) m[f][k] += sum[k];
      }
    }
  }
}

template <typename T>
void run(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t p = problem.p(), q = problem.q(), tiles = ceil_div(q, tile_outputs);
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto* x = static_cast<const T*>(args.x);
  const auto* u = static_cast<const float*>(args.weight);  // [r][f][C][K]
  auto* y = static_cast<T*>(args.y);
  const Epilogue<T> epilogue = make_epilogue<T>(args);
  runtime.parallel_for(0, problem.n * p, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> v(static_cast<std::size_t>(taps * points * problem.c));
    for (std::int64_t tile = begin * tiles; tile < end * tiles; ++tile) {
      const std::int64_t n = tile / tiles / p, op = tile / tiles % p, q0 = tile % tiles * tile_outputs;
      transform_input(problem, in, x, n, op, q0, v.data());
      for (std::int64_t k0 = 0; k0 < problem.k; k0 += filter_block) {
        const std::int64_t count = std::min(filter_block, problem.k - k0);
        float m[points][filter_block];
        multiply(problem, u, v.data(), k0, count, m);
        for (std::int64_t k = 0; k < count; ++k) {
          float sums[points], result[tile_outputs];
          for (std::int64_t f = 0; f < points; ++f) sums[f] = m[f][k];
          Transform::output(sums, result);
          for (std::int64_t i = 0; i < std::min<std::int64_t>(tile_outputs, q - q0); ++i) {
            const std::int64_t index = out(n, k0 + k, op, q0 + i);
            y[index] = epilogue(result[i], index, k0 + k);
          }
        }
      }
    }
  });
}

template <typename T>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const FilterStrides strides = args.strides();
  auto* u = static_cast<float*>(args.packed);  // [r][f][C][K]
  pack_changed_filters<T>(args, runtime, 1, [&](std::int64_t k, const T* filter) {
    for (std::int64_t c = 0; c < problem.c; ++c) {
      for (std::int64_t r = 0; r < taps; ++r) {
        const T* row = filter + c * strides.channel + r * taps * strides.tap;
        const float g[taps] = {to_float(row[0]), to_float(row[strides.tap]), to_float(row[2 * strides.tap])};
        float result[points];
        Transform::filter(g, result);
        for (std::int64_t f = 0; f < points; ++f) u[((r * points + f) * problem.c + c) * problem.k + k] = result[f];
      }
    }
  });
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { run<decltype(zero)>(args, runtime); });
}

void pack_cpu(const PackArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { pack<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::winograd_fused
