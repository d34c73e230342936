// U = G g G^T, offline, in the order in which the FP32 kernel loads it.
#pragma once

#include "algos/winograd_megakernel/ffma/params.cuh"
#include "core/kernels.h"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_megakernel::ffma {

constexpr int pack_threads = 512, pack_lanes = 32;
static_assert(block_filters % pack_lanes == 0);

// A block's part of the weight: 32 filters and the channels of a stage. Its values in the order of memory.
struct WeightPart {
  static constexpr int of_filter = stage_channels * 9, values = pack_lanes * of_filter;
  int filter, channel, filters, channels;  // the first ones; how many exist
  std::int64_t size;                       // of a filter
  FilterStrides strides;

  struct Value {
    int filter, place;   // channel * 9 + tap
    std::int64_t index;  // in the weight; below zero: there is none
  };
  __device__ __forceinline__ Value operator[](int i) const {
    const int of = i / of_filter, rest = i % of_filter;
    const bool channels_last = strides.channel == 1;
    const int c = channels_last ? rest % stage_channels : rest / 9,
              tap = channels_last ? rest / stage_channels : rest % 9;
    const bool exists = of < filters && c < channels;
    return {of, c * 9 + tap, exists ? (filter + of) * size + (channel + c) * strides.channel + tap * strides.tap : -1};
  }
};

// Through shared memory, so that a lane has a filter and stores are whole lines of U. Zeros beyond K and C. With a
// snapshot: a part that equals it bit for bit is left alone (PackArgs::snapshot).
static __global__ void __launch_bounds__(pack_threads)
    pack_filters(int c, int k, int stages, FilterStrides strides, const float* __restrict__ weight,  // [K, C, 3, 3]
                 float* __restrict__ u,           // [filter blocks][36][stages][16 places of channels][64 filters]
                 float* __restrict__ snapshot) {  // [K, C, 3, 3] or null
  __shared__ float values[pack_lanes][WeightPart::of_filter + 1];  // odd, against bank conflicts
  const int stage = static_cast<int>(blockIdx.x) % stages, filter = static_cast<int>(blockIdx.x) / stages * pack_lanes;
  const int channel = stage * stage_channels;
  const WeightPart part{filter, channel, k - filter, c - channel, std::int64_t{c} * 9, strides};
  constexpr int loads = 9;  // of either array, that a thread has in flight
  static_assert(WeightPart::values % (loads * pack_threads) == 0);
  bool differs = false;
#pragma unroll 1
  for (int first = threadIdx.x; first < WeightPart::values; first += loads * pack_threads) {
    float value[loads], seen[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const std::int64_t index = part[first + i * pack_threads].index;
      value[i] = index < 0 ? 0.0f : weight[index];
      seen[i] = index < 0 || snapshot == nullptr ? value[i] : __ldcs(snapshot + index);
    }
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const WeightPart::Value at = part[first + i * pack_threads];
      values[at.filter][at.place] = value[i];
      differs |= __float_as_uint(value[i]) != __float_as_uint(seen[i]);
    }
  }
  if (!__syncthreads_or(differs || snapshot == nullptr)) return;

  const int lane = threadIdx.x % 32;
  const std::int64_t point = std::int64_t{stages} * stage_u;  // floats from one to the next
  float* const block =
      u + filter / block_filters * (36 * point) + std::int64_t{stage} * stage_u + (filter % block_filters + lane ^ 1);
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < stage_channels; i += pack_threads / 32) {
    float g[3][3], value[6][6];
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) g[tap / 3][tap % 3] = values[lane][i * 9 + tap];
    winograd::transform_filter<4>(g, value);
    float* target = block + place_of(i) * block_filters;
#pragma unroll
    for (int j = 0; j < 36; ++j, target += point) *target = value[j / 6][j % 6];
  }
  if (snapshot == nullptr) return;
  __threadfence();  // whoever sees the new snapshot sees what belongs to it
  __syncthreads();
  for (int i = threadIdx.x; i < WeightPart::values; i += pack_threads) {
    const WeightPart::Value at = part[i];
    if (at.index >= 0) snapshot[at.index] = values[at.filter][at.place];
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
