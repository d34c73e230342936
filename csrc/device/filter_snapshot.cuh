// What the packing kernels share: filters are repacked only if they differ from their snapshot.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/kernels.h"
#include "device/numeric.h"
#include "device/power_of_two.h"

namespace fastconv {

// The 16-byte vectors of a filter that starts anywhere, and the elements before and behind them.
template <typename T>
struct FilterVectors {
  static constexpr int width = sizeof(uint4) / sizeof(T);
  int head, count, rest;  // elements before; vectors; elements before and behind

  __device__ FilterVectors(const T* filter, int size) {
    const auto beyond = static_cast<int>(reinterpret_cast<std::uintptr_t>(filter) % sizeof(uint4) / sizeof(T));
    head = min((width - beyond) % width, size);
    count = (size - head) / width;
    rest = size - count * width;
  }
  // None: they could not be loaded from elsewhere, too.
  __device__ void drop(int size) { head = 0, count = 0, rest = size; }
  __device__ int element(int i) const { return i < head ? i : i + count * width; }  // of the rest
};

constexpr int filter_loads = 4;  // of 16 bytes, from one array, that a thread has in flight

// Whether the block's filter (null beyond K) must be packed: there is no snapshot, or it differs bit for bit. All
// threads call it and get the same answer. This is all that a call with an unchanged weight does: it asks for much at
// once, and past the caches, where the packed weight may lie.
template <int threads, typename T>
__device__ __forceinline__ bool filter_changed(const T* filter, const T* snapshot, std::int64_t index, int k,
                                               int size) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>;
  if (snapshot == nullptr) return true;
  if (index >= k) return false;
  const T* seen = snapshot + index * size;
  FilterVectors<T> vectors(filter, size);
  if ((reinterpret_cast<std::uintptr_t>(filter) - reinterpret_cast<std::uintptr_t>(seen)) % sizeof(uint4) != 0) {
    vectors.drop(size);
  }
  const auto* a = reinterpret_cast<const uint4*>(filter + vectors.head);
  const auto* b = reinterpret_cast<const uint4*>(seen + vectors.head);
  std::uint32_t differing = 0;
#pragma unroll 1
  for (int first = threadIdx.x; first < vectors.count; first += filter_loads * threads) {
    uint4 left[filter_loads], right[filter_loads];
#pragma unroll
    for (int i = 0; i < filter_loads; ++i) {
      const int place = min(first + i * threads, vectors.count - 1);
      left[i] = __ldcs(a + place), right[i] = __ldcs(b + place);
    }
#pragma unroll
    for (int i = 0; i < filter_loads; ++i) {
      differing |=
          (left[i].x ^ right[i].x) | (left[i].y ^ right[i].y) | (left[i].z ^ right[i].z) | (left[i].w ^ right[i].w);
    }
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors.rest; i += threads) {
    const int place = vectors.element(i);
    differing |= reinterpret_cast<const Bits*>(filter)[place] ^ reinterpret_cast<const Bits*>(seen)[place];
  }
  return __syncthreads_or(differing != 0);
}

// The largest finite |weight| of the block's filter. All threads call it and get the same answer.
template <int threads>
__device__ __forceinline__ float largest_weight(const float* filter, int size) {
  __shared__ int largest_bits;
  if (threadIdx.x == 0) largest_bits = 0;
  __syncthreads();
  const FilterVectors<float> vectors(filter, size);
  const auto* source = reinterpret_cast<const float4*>(filter + vectors.head);
  float largest = 0.0f;
#pragma unroll 1
  for (int first = threadIdx.x; first < vectors.count; first += filter_loads * threads) {
    float4 four[filter_loads];
#pragma unroll
    for (int i = 0; i < filter_loads; ++i) four[i] = source[min(first + i * threads, vectors.count - 1)];
#pragma unroll
    for (int i = 0; i < filter_loads; ++i) {
      largest = larger_finite(larger_finite(largest, four[i].x), four[i].y);
      largest = larger_finite(larger_finite(largest, four[i].z), four[i].w);
    }
  }
  for (int i = threadIdx.x; i < vectors.rest; i += threads) {
    largest = larger_finite(largest, filter[vectors.element(i)]);
  }
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
