// U = G g G^T, offline, in the order in which the FP32 kernel loads it.
#pragma once

#include "algos/winograd_megakernel/ffma/params.cuh"
#include "device/filter_snapshot.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_megakernel::ffma {

constexpr int pack_threads = 128;

// A block per filter of whole filter blocks; zeros beyond K and C. With a snapshot: a filter that equals it bit for bit
// is left alone (PackArgs::snapshot).
template <typename T>
__global__ void __launch_bounds__(pack_threads)
    pack_filters(int c, int k, int stages, FilterStrides strides, const T* __restrict__ weight,  // [K, C, 3, 3]
                 float* __restrict__ u,       // [filter blocks][36][stages][16 places of channels][64 filters]
                 T* __restrict__ snapshot) {  // [K, C, 3, 3] or null
  const std::int64_t index = blockIdx.x;
  const bool exists = index < k;
  const T* filter = exists ? weight + index * c * 9 : nullptr;
  if (!filter_changed<pack_threads>(filter, snapshot, index, k, c * 9)) return;
  float* const block = u + index / block_filters * 36 * stages * stage_u + (index % block_filters ^ 1);
  for (int channel = threadIdx.x; channel < stages * stage_channels; channel += pack_threads) {
    float g[3][3], value[6][6];
#pragma unroll
    for (int i = 0; i < 9; ++i) {
      g[i / 3][i % 3] = exists && channel < c ? to_float(filter[channel * strides.channel + i * strides.tap]) : 0.0f;
    }
    winograd::transform_filter<4>(g, value);
    const int place = channel / stage_channels * stage_channels + place_of(channel % stage_channels);
    float* target = block + std::int64_t{place} * block_filters;
#pragma unroll
    for (int i = 0; i < 6; ++i) {
#pragma unroll
      for (int j = 0; j < 6; ++j, target += std::int64_t{stages} * stage_u) *target = value[i][j];
    }
  }
  renew_snapshot<pack_threads>(filter, snapshot, index, k, c * 9);
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
