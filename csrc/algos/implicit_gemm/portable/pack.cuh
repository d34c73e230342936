// Weights into the order in which the main loop reads them, with the filters' scales, split into halves.
#pragma once

#include "algos/implicit_gemm/portable/tile.cuh"
#include "device/filter_snapshot.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::portable {

constexpr int filter_target_exponent = 13;

// A block per filter. With a snapshot: a filter that equals it bit for bit is left alone (PackArgs::snapshot).
template <typename T, int limbs>
__global__ void __launch_bounds__(threads)
    pack_filters(int c, int taps, int steps, int k_per_group, FilterStrides strides,
                 const T* __restrict__ weight,  // [K, C/G, R, S]
                 Half<T>* __restrict__ packed,  // [G][steps][limbs][K/G][32]
                 int* __restrict__ exponents,   // [K]
                 T* __restrict__ snapshot) {    // [K, C/G, R, S] or null
  const std::int64_t k = blockIdx.x, filters = gridDim.x;
  const int size = c * taps;
  const T* filter = weight + k * size;
  if (!filter_changed<threads>(filter, snapshot, k, static_cast<int>(filters), size)) return;
  int exponent = 0;
  if constexpr (std::is_same_v<T, float>) {
    exponent = scale_exponent(largest_weight<threads>(filter, size), filter_target_exponent);
  }
  for (int j = threadIdx.x; j < steps * depth_tile; j += threads) {
    const T raw = j < size ? filter[j % c * strides.channel + j / c * strides.tap] : from_float<T>(0.0f);
    const std::int64_t step = k / k_per_group * steps + j / depth_tile;
    Half<T>* target = packed + (step * limbs * k_per_group + k % k_per_group) * depth_tile + j % depth_tile;
    if constexpr (std::is_same_v<T, float>) {
      const float value = raw * power_of_two(exponent);
      const half_t high = from_float<half_t>(value);
      *target = high;
      if constexpr (limbs == 2) target[k_per_group * depth_tile] = from_float<half_t>(value - to_float(high));
    } else {
      *target = raw;
    }
  }
  if (threadIdx.x == 0) exponents[k] = exponent;
  renew_snapshot<threads>(filter, snapshot, k, static_cast<int>(filters), size);
}

}  // namespace fastconv::algos::implicit_gemm::portable
