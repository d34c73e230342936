// Weights into the order of B's fragments, with the filters' scales, split into halves.
#pragma once

#include "algos/implicit_gemm/few_channels/tile.cuh"
#include "device/filter_snapshot.cuh"

namespace fastconv::algos::implicit_gemm::few_channels {

constexpr int filter_target_exponent = 13, pack_threads = 128;

// A block per filter, those beyond K included. Leaves the snapshot to the packing of the other kernels' weight.
template <typename T, int limbs>
__global__ void __launch_bounds__(pack_threads) pack_filters(Weights weights, FilterStrides strides,
                                                             const T* __restrict__ weight,        // [K, C, R, S]
                                                             unsigned char* __restrict__ packed,  // plan.h
                                                             const T* __restrict__ snapshot) {  // [K, C, R, S] or null
  using H = Half<T>;
  const int k = blockIdx.x, c = static_cast<int>(weights.c), s = static_cast<int>(weights.s);
  const int size = static_cast<int>(weights.c * weights.r * weights.s);
  const bool exists = k < weights.k;
  const T* filter = weight + static_cast<std::int64_t>(k) * size;
  if (!filter_changed<pack_threads>(exists ? filter : nullptr, snapshot, k, static_cast<int>(weights.k), size)) return;
  int exponent = 0;
  if constexpr (std::is_same_v<T, float>) {
    exponent = scale_exponent(largest_weight<pack_threads>(filter, exists ? size : 0), filter_target_exponent);
  }
  const int filter_tile = weights.filter_tile, tile = k / filter_tile;
  for (int form = 0; form < weights.forms(); ++form) {
    const bool dense = form == 1;
    const int pitch = weights.pitch(dense), row_values = static_cast<int>(weights.row_pairs(dense)) * 2;
    unsigned char* target = packed + weights.form_offset(dense) + tile * weights.tile_bytes(dense);
    const int limb_bytes = filter_tile * step_pairs * 4;
    for (int j = threadIdx.x; j < weights.steps(dense) * step_pairs * 2; j += pack_threads) {
      const int r = j / row_values, half = j % row_values, tap = half / pitch, channel = half % pitch;
      const bool inside = exists && r < weights.r && tap < s && channel < c;
      const T raw = inside ? filter[channel * strides.channel + (r * s + tap) * strides.tap] : from_float<T>(0.0f);
      const PackedPlace place(weights.vector, k % filter_tile, j / 2);
      auto* to = reinterpret_cast<H*>(target + j / 2 / step_pairs * limbs * limb_bytes + place.offset) + j % 2;
      if constexpr (std::is_same_v<T, float>) {
        const float value = raw * power_of_two(exponent);
        const H high = from_float<H>(value);
        *to = high;
        if constexpr (limbs == 2) to[limb_bytes / 2] = from_float<H>(value - to_float(high));
      } else {
        *to = raw;
      }
    }
  }
  if (threadIdx.x == 0) reinterpret_cast<int*>(packed + weights.exponents_offset())[k] = exponent;
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
