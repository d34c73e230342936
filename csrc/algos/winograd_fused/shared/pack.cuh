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

constexpr int pack_threads = 256, filter_target_exponent = 13;

// A thread's 16 bytes of U in a fragment belong to two filters, its two rows. For float32 these are neighbours, so that
// a thread can store their outputs together; half types have the rows in order.
template <typename T>
__device__ __forceinline__ int filter_of(int pair, int second) {
  return std::is_same_v<T, float> ? pair * 2 + second : pair / 8 * 16 + second * 8 + pair % 8;
}

// A block per pair of filters, beyond K for those that fill the last 64. With a snapshot: filters that equal it bit for
// bit are left alone (PackArgs::snapshot). limbs: hi and lo, or one half alone. steps: of 16 channels.
template <typename T, int limbs>
__global__ void __launch_bounds__(pack_threads) pack_filters(int c, int filters, int steps, FilterStrides strides,
                                                             const T* __restrict__ weight,  // [K, C, 3, 3]
                                                             half_t* __restrict__ u,
                                                             int* __restrict__ exponents,  // [K]
                                                             T* __restrict__ snapshot) {   // [K, C, 3, 3] or null
  constexpr int fragment = u_fragment_bytes / sizeof(uint4);
  using Transform = winograd::Transform<4>;
  const int pair = blockIdx.x, size = c * 9;
  const T* filter[2];
  bool changed = false;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int k = filter_of<T>(pair, second);
    filter[second] = weight + static_cast<std::int64_t>(k) * size;
    changed |= filter_changed<pack_threads>(filter[second], snapshot, k, filters, size);
  }
  if (!changed) return;

  const auto transform = [&](int second, int channel, int r, float (&result)[points]) {
    float g[3] = {};
    if (filter_of<T>(pair, second) < filters && channel < c) {
#pragma unroll
      for (int s = 0; s < 3; ++s)
        g[s] = to_float(filter[second][channel * strides.channel + (r * 3 + s) * strides.tap]);
    }
    Transform::filter(g, result);
  };
  __shared__ int largest_bits[2];
  if (threadIdx.x < 2) largest_bits[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    float largest = 0.0f;
#pragma unroll 2
    for (int i = threadIdx.x; i < c * taps; i += pack_threads) {
      float value[points];
      transform(second, i / taps, i % taps, value);
#pragma unroll
      for (int f = 0; f < points; ++f) largest = larger_finite(largest, value[f]);
    }
    atomicMax(&largest_bits[second], __float_as_int(largest));
  }
  __syncthreads();
  int exponent[2];
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    exponent[second] = scale_exponent(__int_as_float(largest_bits[second]), filter_target_exponent);
  }

  // A thread of a fragment has channels 2 quad, 2 quad + 1 of both filters, then the same 8 channels on.
  const int filter_in_tile = filter_of<T>(pair, 0) % filter_tile;
  const int row = filter_in_tile / 16 * 8 + (std::is_same_v<T, float> ? filter_in_tile % 16 / 2 : filter_in_tile % 8);
  auto* const of_row =
      reinterpret_cast<uint4*>(u) +
      static_cast<std::int64_t>(filter_of<T>(pair, 0) / filter_tile) * steps * (points * taps * limbs * fragment) +
      row * 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < steps * taps * 4; i += pack_threads) {
    const int quad = i % 4, r = i / 4 % taps, step = i / (4 * taps);
    float value[8][points];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int second = e / 2 % 2;
      transform(second, step * channels + e / 4 * 8 + quad * 2 + e % 2, r, value[e]);
#pragma unroll
      for (int f = 0; f < points; ++f) value[e][f] *= power_of_two(exponent[second]);
    }
#pragma unroll
    for (int f = 0; f < points; ++f) {
      const int place = limbs == 2 ? f : single::point_order(f);
      uint4* target = of_row + ((std::int64_t{step} * points + place) * taps + r) * (limbs * fragment) + quad;
      alignas(16) half_t high[8], low[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        high[e] = from_float<half_t>(value[e][f]);
        low[e] = from_float<half_t>(value[e][f] - to_float(high[e]));
      }
      target[0] = *reinterpret_cast<const uint4*>(high);
      if constexpr (limbs == 2) target[fragment] = *reinterpret_cast<const uint4*>(low);
    }
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int k = filter_of<T>(pair, second);
    if (threadIdx.x == 0 && k < filters) exponents[k] = exponent[second];
    renew_snapshot<pack_threads>(filter[second], snapshot, k, filters, size);
  }
}

template <typename T, int limbs>
void pack(const PackArgs& args, cudaStream_t stream) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(problem);
  auto* packed = static_cast<char*>(args.packed);
  const auto blocks = static_cast<unsigned>(config.filter_tiles * filter_tile / 2);
  pack_filters<T, limbs><<<blocks, pack_threads, 0, stream>>>(
      static_cast<int>(problem.c), static_cast<int>(problem.k), static_cast<int>(config.u_steps), args.strides(),
      static_cast<const T*>(args.weight), reinterpret_cast<half_t*>(packed),
      reinterpret_cast<int*>(packed + config.u_bytes()), static_cast<T*>(args.snapshot));
  check_launch("winograd_fused: packing");
}

}  // namespace fastconv::algos::winograd_fused
