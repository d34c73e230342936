// The weight gradient of depthwise convolutions in FP32 arithmetic: for each channel, sums over a row of output pixels,
// then sums of these.
#include <vector>

#include "core/kernels.h"
#include "device/indexing.h"
#include "device/numeric.h"

namespace fastconv::algos::direct_tiled {
namespace {

template <typename T>
void sum_products(const WeightGradientArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto* x = static_cast<const T*>(args.x);
  const auto* grad = static_cast<const T*>(args.grad);
  auto* dw = static_cast<T*>(args.dw);  // one channel a filter: the same in both memory orders
  const std::int64_t taps = problem.r * problem.s;

  runtime.parallel_for(0, problem.c, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> total;
    for (std::int64_t c = begin; c < end; ++c) {
      total.assign(static_cast<std::size_t>(taps), 0.0f);
      for (std::int64_t np = 0; np < problem.n * problem.p(); ++np) {
        const std::int64_t n = np / problem.p(), p = np % problem.p();
        for (std::int64_t tap = 0; tap < taps; ++tap) {
          const std::int64_t h = p * problem.stride_h - problem.pad_h + tap / problem.s;
          if (h < 0 || h >= problem.h) continue;
          float sum = 0.0f;
          for (std::int64_t q = 0; q < problem.q(); ++q) {
            const std::int64_t w = q * problem.stride_w - problem.pad_w + tap % problem.s;
            if (w < 0 || w >= problem.w) continue;
            sum += to_float(grad[out(n, c, p, q)]) * to_float(x[in(n, c, h, w)]);
          }
          total[static_cast<std::size_t>(tap)] += sum;
        }
      }
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        dw[c * taps + tap] = from_float<T>(total[static_cast<std::size_t>(tap)]);
      }
    }
  });
}

}  // namespace

void weight_gradient_cpu(const WeightGradientArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { sum_products<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::direct_tiled
