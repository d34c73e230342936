#include "core/kernels.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::direct {
namespace {

template <typename T>
void convolve(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto* x = static_cast<const T*>(args.x);            // [N, C, H, W]
  const auto* weight = static_cast<const T*>(args.weight);  // [K, C/G, R, S]
  auto* y = static_cast<T*>(args.y);                        // [N, K, P, Q]
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto epilogue = make_epilogue<T>(args);
  const std::int64_t p_size = problem.p(), q_size = problem.q(), c_size = problem.c_per_group();

  runtime.parallel_for(0, problem.n * problem.k * p_size, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t p = row % p_size, k = row / p_size % problem.k, n = row / p_size / problem.k;
      const std::int64_t c0 = k / problem.k_per_group() * c_size;
      for (std::int64_t q = 0; q < q_size; ++q) {
        float sum = 0.0f;
        for (std::int64_t c = 0; c < c_size; ++c) {
          float channel = 0.0f;  // a sum of sums: the error of a long reduction grows with its longest part alone
          for (std::int64_t r = 0; r < problem.r; ++r) {
            const std::int64_t h = p * problem.stride_h + r * problem.dilation_h - problem.pad_h;
            if (h < 0 || h >= problem.h) continue;
            for (std::int64_t s = 0; s < problem.s; ++s) {
              const std::int64_t w = q * problem.stride_w + s * problem.dilation_w - problem.pad_w;
              if (w < 0 || w >= problem.w) continue;
              channel += to_float(x[in(n, c0 + c, h, w)]) *
                         to_float(weight[((k * c_size + c) * problem.r + r) * problem.s + s]);
            }
          }
          sum += channel;
        }
        const std::int64_t index = out(n, k, p, q);
        y[index] = epilogue(sum, index, k);
      }
    }
  });
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { convolve<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::direct
