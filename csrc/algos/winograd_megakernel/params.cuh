// What the kernel's roles share: parameters, shared memory, counters in device memory.
#pragma once

#include <cstdint>

#include "device/epilogue.h"
#include "device/fast_divide.h"
#include "device/hopper.cuh"
#include "plan/task_map.h"

namespace fastconv::algos::winograd_megakernel {

// A GEMM task: 128 tiles x 128 filters of one frequency. A tile has a scale for each chunk of channels.
constexpr int unit_tiles = 128, unit_filters = 128, chunk_channels = 64;
// Products are multiplied by 2^-(e + 14), e the chunk's exponent: together with the filters' scale (their largest
// |U| lies in [2^13, 2^14)) M has the magnitude of B^T d B, and FP32's range is enough for any weight.
constexpr int product_exponent = -14;

// One task's times, for fastconv trace: %globaltimer in ns.
struct TraceRecord {
  unsigned long long begin, end;
  int kind, group, index, processor;
};

template <typename T>
struct Params {
  TaskMap map;
  const T* x;                   // [N, H, W, C]
  T* y;                         // [N, P, Q, K]
  const int* filter_exponents;  // [K]
  half_t* v;                    // [v_groups][36][128 tiles][lo, hi][C_pad]
  float* unscale;               // [chunks][groups * 128]: what a tile's products of a chunk are multiplied by
  float* products;              // M [m_groups][36][128 tiles][K_pad]
  int* tickets;                 // two, 128 bytes apart: of the GEMM tasks, and of all others
  int* counters;                // the map's
  TraceRecord* trace;           // [map.size()], GEMM tasks first; or null
  Epilogue<T> epilogue;
  WaitReport* report;
  int n, c, h, w, k, p, q, pad_h, pad_w;
  int tiles_p, tiles_q;
  int c_pad, k_pad;
  FastDivide by_tiles_q, by_tiles_p;
  int delay;  // tests: each task is delayed by up to so many ns

  __host__ __device__ int chunks() const { return (c_pad + chunk_channels - 1) / chunk_channels; }
  __host__ __device__ std::int64_t unscale_pitch() const { return std::int64_t{map.groups} * unit_tiles; }
  __host__ __device__ std::int64_t v_place() const { return std::int64_t{36} * unit_tiles * 2 * c_pad; }  // elements
  __host__ __device__ std::int64_t m_place() const { return std::int64_t{36} * unit_tiles * k_pad; }
};
constexpr int ticket_stride = 32;  // ints

// ---- Counters of the task map, in device memory

__device__ __forceinline__ int load_acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
// What this thread has done or seen happens before the raise.
__device__ __forceinline__ void raise(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ bool is_ready(const Signals& signals, const int* counters) {
  bool ready = true;
  for (int i = 0; i < signals.waits; ++i) ready = ready && load_acquire(counters + signals.wait[i].counter) >= signals.wait[i].value;
  return ready;
}
// Bounded, like every wait.
__device__ __forceinline__ void await(const Signals& signals, const int* counters, const WaitSite& site) {
#pragma unroll 1
  for (int tries = 0; !is_ready(signals, counters); ++tries) {
    if (tries == WaitSite::limit) site.expire();
  }
}
// Orders ordinary accesses to global memory that are known here before copies that this thread starts later.
__device__ __forceinline__ void fence_global_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ unsigned long long global_time() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
__device__ __forceinline__ int processor() {
  int id;
  asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  return id;
}
// For tests: a delay that depends on who asks when.
__device__ __forceinline__ void delay_randomly(int most) {
  if (most == 0) return;
  const unsigned random = (static_cast<unsigned>(clock64()) ^ blockIdx.x * 0x9E3779B9u) * 0x85EBCA6Bu;
  if (random >> 30 == 0) __nanosleep((random >> 8) % static_cast<unsigned>(most));
}

}  // namespace fastconv::algos::winograd_megakernel
