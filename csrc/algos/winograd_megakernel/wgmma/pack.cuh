// U = G g G^T, offline, with the filter's scale, in one half or two, in the order in which the kernel loads it.
#pragma once

#include "algos/winograd_megakernel/shared/values.cuh"
#include "algos/winograd_megakernel/wgmma/params.cuh"
#include "device/filter_snapshot.cuh"
#include "device/power_of_two.h"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_megakernel::wgmma {

constexpr int pack_threads = 256;

// A block per filter of whole filter blocks; zeros beyond K and C. With a snapshot: a filter that equals it bit for bit
// is left alone (PackArgs::snapshot).
template <typename T>
__global__ void __launch_bounds__(pack_threads)
    pack_filters(int c, int k, int chunks, FilterStrides strides, const T* __restrict__ weight,  // [K, C, 3, 3]
                 char* __restrict__ u,         // [36][filter blocks][stages][128 filters][64]
                 int* __restrict__ exponents,  // [K]
                 T* __restrict__ snapshot) {   // [K, C, 3, 3] or null
  __shared__ int largest_bits;                 // of a float that is not negative
  if (threadIdx.x == 0) largest_bits = 0;
  const std::int64_t index = blockIdx.x, blocks = gridDim.x / tile_n;
  const bool exists = index < k;
  const T* filter = exists ? weight + index * c * 9 : nullptr;
  if (!filter_changed<pack_threads>(filter, snapshot, index, k, c * 9)) return;
  const auto transform = [&](int channel, float (&result)[6][6]) {
    float g[3][3];
#pragma unroll
    for (int i = 0; i < 9; ++i) {
      g[i / 3][i % 3] = exists && channel < c ? to_float(filter[channel * strides.channel + i * strides.tap]) : 0.0f;
    }
    winograd::transform_filter<4>(g, result);
  };
  float largest = 0.0f;
  for (int channel = threadIdx.x; channel < c; channel += pack_threads) {
    float value[6][6];
    transform(channel, value);
#pragma unroll
    for (int i = 0; i < 36; ++i) largest = larger_finite(largest, value[i / 6][i % 6]);
  }
  __syncthreads();
  atomicMax(&largest_bits, __float_as_int(largest));
  __syncthreads();
  constexpr int stage_channels = form<T>.stage_channels();
  const int stages = form<T>.limbs * chunks;
  const int exponent = scale_exponent(__int_as_float(largest_bits), filter_target_exponent);
  const float scale = power_of_two(exponent);
  const int row = static_cast<int>(index % tile_n);
  for (int channel = threadIdx.x; channel < chunks * chunk_channels; channel += pack_threads) {
    float value[6][6];
    transform(channel, value);
    const int in_stage = channel % stage_channels;
    const int low_piece = hopper::swizzle_128(row, in_stage / 8) * 16, high_piece = low_piece ^ 64;
    char* target =
        u + (index / tile_n * stages + channel / stage_channels) * operand_bytes + row * 128 + in_stage % 8 * 2;
#pragma unroll
    for (int i = 0; i < 36; ++i) {
      const float scaled = value[i / 6][i % 6] * scale;
      const half_t high = from_float<half_t>(scaled);
      if constexpr (is_split<T>) {
        *reinterpret_cast<half_t*>(target + low_piece) = from_float<half_t>(scaled - to_float(high));
        *reinterpret_cast<half_t*>(target + high_piece) = high;
      } else {
        *reinterpret_cast<half_t*>(target + low_piece) = high;
      }
      target += blocks * stages * operand_bytes;
    }
  }
  if (exists && threadIdx.x == 0) exponents[index] = exponent;
  renew_snapshot<pack_threads>(filter, snapshot, index, k, c * 9);
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
