// The same reduction order in FP32 arithmetic: for each output pixel, rows of the packed weight times one input value.
#include <algorithm>

#include "algos/implicit_gemm/plan.h"
#include "core/kernels.h"
#include "device/epilogue.h"
#include "device/indexing.h"
#include "host/pack.h"

namespace fastconv::algos::implicit_gemm {
namespace {

constexpr std::int64_t filter_block = 64, channel_block = 64;

template <typename T>
void convolve(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t p = problem.p(), q = problem.q();
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto* x = static_cast<const T*>(args.x);
  const auto* weight = static_cast<const float*>(args.weight);  // [R, S, C/G, K]
  auto* y = static_cast<T*>(args.y);
  const Epilogue<T> epilogue = make_epilogue<T>(args);
  const ActivationFunction activate_input(problem.input_activation, 0.0f);

  const std::int64_t channels = problem.c_per_group(), filters = problem.k_per_group();
  const auto pixel = [&](std::int64_t n, std::int64_t op, std::int64_t oq, std::int64_t group, std::int64_t first) {
    const std::int64_t count = std::min(filter_block, filters - first), k0 = group * filters + first;
    float total[filter_block] = {};
    for (std::int64_t tap = 0; tap < problem.r * problem.s; ++tap) {
      const std::int64_t h = op * problem.stride_h - problem.pad_h + tap / problem.s * problem.dilation_h;
      const std::int64_t w = oq * problem.stride_w - problem.pad_w + tap % problem.s * problem.dilation_w;
      if (h < 0 || h >= problem.h || w < 0 || w >= problem.w) continue;
      for (std::int64_t c0 = 0; c0 < channels; c0 += channel_block) {
        float sum[filter_block] = {};  // sums of sums round less than one long chain
        for (std::int64_t c = c0; c < std::min(c0 + channel_block, channels); ++c) {
          const std::int64_t channel = group * channels + c;
          float value = to_float(x[in(n, channel, h, w)]);
          if (problem.input_affine) value = activate_input(value * args.scale[channel] + args.shift[channel]);
          const float* row = weight + (tap * channels + c) * problem.k + k0;
          for (std::int64_t k = 0; k < count; ++k) sum[k] += value * row[k];
        }
        for (std::int64_t k = 0; k < count; ++k) total[k] += sum[k];
      }
    }
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t index = out(n, k0 + k, op, oq);
      y[index] = epilogue(total[k], index, k0 + k);
    }
  };
  runtime.parallel_for(0, problem.n * p * q, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t m = begin; m < end; ++m) {
      for (std::int64_t group = 0; group < problem.groups; ++group) {
        for (std::int64_t k0 = 0; k0 < filters; k0 += filter_block) pixel(m / q / p, m / q % p, m % q, group, k0);
      }
    }
  });
}

template <typename T>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t taps = problem.r * problem.s, channels = problem.c_per_group();
  const FilterStrides strides = args.strides();
  auto* packed = static_cast<float*>(args.packed);  // [R, S, C/G, K]
  pack_changed_filters<T>(args, runtime, 1, [&](std::int64_t k, const T* filter) {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        packed[(tap * channels + c) * problem.k + k] = to_float(filter[c * strides.channel + tap * strides.tap]);
      }
    }
  });
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { convolve<decltype(zero)>(args, runtime); });
}

void pack_cpu(const PackArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { pack<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::implicit_gemm
