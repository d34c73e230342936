// The weight gradient on the CPU, in FP32 arithmetic, any number of groups: for each filter, sums over a row of output
// pixels, then sums of these, since sums of sums round less than one long chain.
#pragma once

#include <cstdint>
#include <vector>

#include "core/kernels.h"
#include "device/indexing.h"
#include "device/numeric.h"

namespace fastconv {

template <typename T>
void sum_weight_gradient(const WeightGradientArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto* x = static_cast<const T*>(args.x);
  const auto* grad = static_cast<const T*>(args.grad);
  auto* dw = static_cast<T*>(args.dw);
  const std::int64_t channels = problem.c_per_group(), taps = problem.r * problem.s, size = taps * channels;

  runtime.parallel_for(0, problem.k, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> total, row;  // [R, S, C/groups]
    for (std::int64_t k = begin; k < end; ++k) {
      const T* group = x + k / problem.k_per_group() * channels * in.c;
      total.assign(static_cast<std::size_t>(size), 0.0f);
      for (std::int64_t np = 0; np < problem.n * problem.p(); ++np) {
        const std::int64_t n = np / problem.p(), p = np % problem.p();
        row.assign(static_cast<std::size_t>(size), 0.0f);
        for (std::int64_t tap = 0; tap < taps; ++tap) {
          const std::int64_t h = p * problem.stride_h - problem.pad_h + tap / problem.s * problem.dilation_h;
          if (h < 0 || h >= problem.h) continue;
          float* sum = row.data() + tap * channels;
          for (std::int64_t q = 0; q < problem.q(); ++q) {
            const std::int64_t w = q * problem.stride_w - problem.pad_w + tap % problem.s * problem.dilation_w;
            if (w < 0 || w >= problem.w) continue;
            const float g = to_float(grad[out(n, k, p, q)]);
            const T* pixel = group + in(n, 0, h, w);
            for (std::int64_t c = 0; c < channels; ++c) sum[c] += g * to_float(pixel[c * in.c]);
          }
        }
        for (std::int64_t i = 0; i < size; ++i) total[static_cast<std::size_t>(i)] += row[static_cast<std::size_t>(i)];
      }
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        for (std::int64_t c = 0; c < channels; ++c) {
          const std::int64_t at = args.channels_last ? tap * channels + c : c * taps + tap;
          dw[k * size + at] = from_float<T>(total[static_cast<std::size_t>(tap * channels + c)]);
        }
      }
    }
  });
}

}  // namespace fastconv
