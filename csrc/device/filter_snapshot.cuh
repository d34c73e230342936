// What the packing kernels share: a block per filter, repacked only if it differs from its snapshot.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/kernels.h"
#include "device/numeric.h"
#include "device/power_of_two.h"

namespace fastconv {

// Whether the block's filter (null beyond K) must be packed: there is no snapshot, or it differs bit for bit. All
// threads call it and get the same answer.
template <int threads, typename T>
__device__ __forceinline__ bool filter_changed(const T* filter, const T* snapshot, std::int64_t index, int k,
                                               int size) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>;
  if (snapshot == nullptr) return true;
  if (index >= k) return false;
  const T* seen = snapshot + index * size;
  bool differs = false;
  // 16 bytes at a time where both lie so: this is most of what a call with an unchanged weight does.
  const bool aligned =
      (reinterpret_cast<std::uintptr_t>(filter) | reinterpret_cast<std::uintptr_t>(seen)) % sizeof(uint4) == 0;
  constexpr int per_load = sizeof(uint4) / sizeof(T);
  const int loads = aligned ? size / per_load : 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < loads; i += threads) {
    const uint4 a = reinterpret_cast<const uint4*>(filter)[i], b = reinterpret_cast<const uint4*>(seen)[i];
    differs |= ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0;
  }
  for (int i = loads * per_load + threadIdx.x; i < size; i += threads) {
    differs |= reinterpret_cast<const Bits*>(filter)[i] != reinterpret_cast<const Bits*>(seen)[i];
  }
  return __syncthreads_or(differs);
}

// The largest finite |weight| of the block's filter. All threads call it and get the same answer.
template <int threads>
__device__ __forceinline__ float largest_weight(const float* filter, int size) {
  __shared__ int largest_bits;
  if (threadIdx.x == 0) largest_bits = 0;
  __syncthreads();
  float largest = 0.0f;
  for (int i = threadIdx.x; i < size; i += threads) largest = larger_finite(largest, filter[i]);
  atomicMax(&largest_bits, __float_as_int(largest));
  __syncthreads();
  return __int_as_float(largest_bits);
}

// After packing: whoever sees the new snapshot sees the filter that belongs to it.
template <int threads, typename T>
__device__ __forceinline__ void renew_snapshot(const T* filter, T* snapshot, std::int64_t index, int k, int size) {
  if (snapshot == nullptr || index >= k) return;
  __threadfence();
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += threads) snapshot[index * size + i] = filter[i];
}

}  // namespace fastconv
