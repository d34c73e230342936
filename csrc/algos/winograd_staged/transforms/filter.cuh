// U = G g G^T, offline, with the filter's scale and, in split mode, the split into two halves.
#pragma once

#include "algos/winograd_staged/transforms/tile_math.cuh"
#include "device/filter_snapshot.cuh"

namespace fastconv::algos::winograd_staged {

constexpr int filter_threads = 256;

// A block per filter. With a snapshot: a filter that equals it bit for bit is left alone (PackArgs::snapshot).
template <typename T, int m, Mode mode>
__global__ void __launch_bounds__(filter_threads)
    filter_transform(int c, int c_pad, int group_channels, int depth, FilterStrides strides,
                     const T* __restrict__ weight,                  // [K, C, 3, 3]
                     typename Operand<mode>::type* __restrict__ u,  // [alpha^2][K][depth]
                     int* __restrict__ exponents,                   // [K]
                     T* __restrict__ snapshot) {                    // [K, C, 3, 3] or null
  constexpr int alpha = m + 2;
  __shared__ float scratch[8];
  const std::int64_t k = blockIdx.x, filters = gridDim.x;
  const T* filter = weight + k * c * 9;
  if (!filter_changed<filter_threads>(filter, snapshot, k, static_cast<int>(filters), c * 9)) return;
  const auto transform = [&](int channel, float (&result)[alpha][alpha]) {
    float g[3][3];
#pragma unroll
    for (int i = 0; i < 9; ++i) {
      g[i / 3][i % 3] = channel < c ? to_float(filter[channel * strides.channel + i * strides.tap]) : 0.0f;
    }
    winograd::transform_filter<m>(g, result);
  };

  // A power of two may be applied before or after: the raw filter's own maximum is safe to square the gain of G with.
  float scale = 1.0f;
  int exponent = 0;
  if constexpr (mode != Mode::fp32) {
    float largest = 0.0f;
    for (int channel = threadIdx.x; channel < c; channel += blockDim.x) {
      float value[alpha][alpha];
      transform(channel, value);
#pragma unroll
      for (int i = 0; i < alpha; ++i) {
#pragma unroll
        for (int j = 0; j < alpha; ++j) largest = larger_finite(largest, value[i][j]);
      }
    }
    exponent = scale_exponent(row_max(lanes_max(largest, blockDim.x), blockDim.x, scratch), filter_target_exponent);
    scale = power_of_two(exponent);
  }
  for (int channel = threadIdx.x; channel < c_pad; channel += blockDim.x) {
    float value[alpha][alpha];
    transform(channel, value);
#pragma unroll
    for (int i = 0; i < alpha; ++i) {
#pragma unroll
      for (int j = 0; j < alpha; ++j) {
        const std::int64_t row = static_cast<std::int64_t>(i * alpha + j) * filters + k;
        // Behind the groups before, whose second limbs lie there, too.
        const int place = channel + channel / group_channels * group_channels;
        store_operand<mode, true>(u + row * depth + place, group_channels, depth > 2 * c_pad,
                                  Pack<1>{{value[i][j] * scale}});
      }
    }
  }
  if (threadIdx.x == 0) exponents[k] = exponent;
  renew_snapshot<filter_threads>(filter, snapshot, k, static_cast<int>(filters), c * 9);
}

}  // namespace fastconv::algos::winograd_staged
