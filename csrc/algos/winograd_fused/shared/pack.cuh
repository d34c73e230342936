// U = G g along W, offline: with the filters' scales, split into halves, in the order of wgmma's registers.
#pragma once

#include <type_traits>

#include "algos/winograd_fused/plan.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/filter_snapshot.cuh"
#include "device/numeric.h"
#include "device/power_of_two.h"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_fused {

constexpr int pack_threads = 128, filter_target_exponent = 13;

// Where U[f][k][c, r] lies, in halves. For float32 a thread's two rows of a fragment are neighbouring filters, so that
// it can store their outputs together; half types have the rows in order.
template <typename T, int limbs>
__device__ __forceinline__ std::int64_t packed_index(int k, int c, int steps, int f, int r) {
  const int filter = k % filter_tile, channel = c % channels;
  constexpr bool neighbours = std::is_same_v<T, float>;
  const int row = neighbours ? filter % 16 / 2 : filter % 8, second = neighbours ? filter % 2 : filter / 8 % 2;
  const int lane = row * 4 + channel % 8 / 2, thread = filter / 16 * 32 + lane;
  const int element = (second + channel / 8 * 2) * 2 + channel % 2;
  const std::int64_t step = static_cast<std::int64_t>(k / filter_tile) * steps + c / channels;
  const int place = limbs == 2 ? f : single::point_order(f);
  return ((step * points + place) * taps + r) * (limbs * u_fragment_bytes / 2) + thread * 8 + element;
}

// A block per filter, beyond K for those that fill the last 64. With a snapshot: a filter that equals it bit for bit is
// left alone (PackArgs::snapshot). limbs: hi and lo, or one half alone. steps: of 16 channels.
template <typename T, int limbs>
__global__ void __launch_bounds__(pack_threads) pack_filters(int c, int filters, int steps, FilterStrides strides,
                                                             const T* __restrict__ weight,  // [K, C, 3, 3]
                                                             half_t* __restrict__ u,
                                                             int* __restrict__ exponents,  // [K]
                                                             T* __restrict__ snapshot) {   // [K, C, 3, 3] or null
  const int k = blockIdx.x, size = c * 9;
  const T* filter = weight + static_cast<std::int64_t>(k) * size;
  if (!filter_changed<pack_threads>(filter, snapshot, k, filters, size)) return;
  using Transform = winograd::Transform<4>;
  const auto transform = [&](int channel, int r, float (&result)[points]) {
    float g[3] = {};
    if (k < filters && channel < c) {
#pragma unroll
      for (int s = 0; s < 3; ++s) g[s] = to_float(filter[channel * strides.channel + (r * 3 + s) * strides.tap]);
    }
    Transform::filter(g, result);
  };
  __shared__ int largest_bits;
  if (threadIdx.x == 0) largest_bits = 0;
  __syncthreads();
  float largest = 0.0f;
  for (int i = threadIdx.x; i < c * taps; i += pack_threads) {
    float value[points];
    transform(i / taps, i % taps, value);
#pragma unroll
    for (int f = 0; f < points; ++f) largest = larger_finite(largest, value[f]);
  }
  atomicMax(&largest_bits, __float_as_int(largest));
  __syncthreads();
  const int exponent = scale_exponent(__int_as_float(largest_bits), filter_target_exponent);
  const float scale = power_of_two(exponent);
  for (int i = threadIdx.x; i < steps * channels * taps; i += pack_threads) {
    float value[points];
    transform(i / taps, i % taps, value);
#pragma unroll
    for (int f = 0; f < points; ++f) {
      half_t* target = u + packed_index<T, limbs>(k, i / taps, steps, f, i % taps);
      const half_t high = from_float<half_t>(value[f] * scale);
      target[0] = high;
      if constexpr (limbs == 2) target[u_fragment_bytes / 2] = from_float<half_t>(value[f] * scale - to_float(high));
    }
  }
  if (threadIdx.x == 0 && k < filters) exponents[k] = exponent;
  renew_snapshot<pack_threads>(filter, snapshot, k, filters, size);
}

template <typename T, int limbs>
void pack(const PackArgs& args, cudaStream_t stream) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(problem);
  auto* packed = static_cast<char*>(args.packed);
  const auto blocks = static_cast<unsigned>(config.filter_tiles * filter_tile);
  pack_filters<T, limbs><<<blocks, pack_threads, 0, stream>>>(
      static_cast<int>(problem.c), static_cast<int>(problem.k), static_cast<int>(config.u_steps), args.strides(),
      static_cast<const T*>(args.weight), reinterpret_cast<half_t*>(packed),
      reinterpret_cast<int*>(packed + config.u_bytes()), static_cast<T*>(args.snapshot));
  check_launch("winograd_fused: packing");
}

}  // namespace fastconv::algos::winograd_fused
