// What the kernel's roles share: parameters, shared memory, counters in device memory.
#pragma once

#include <cstdint>

#include "device/epilogue.h"
#include "device/fast_divide.h"
#include "device/hopper.cuh"
#include "plan/task_map.h"

#ifdef PROFILE
__device__ unsigned long long profile[32];
#define PROF(i) do { __syncwarp(); const long long prof_now = clock64(); if (threadIdx.x % 32 == 0) atomicAdd(&profile[i], static_cast<unsigned long long>(prof_now - prof_last)); __syncwarp(); prof_last = clock64(); } while (0)
#define PROF_BEGIN long long prof_last = clock64()
#else
#define PROF(i)
#define PROF_BEGIN
#endif
namespace fastconv::algos::winograd_megakernel {

// A GEMM task: 128 tiles x 128 filters of one frequency. Its operands lie in global memory as they will in shared memory:
// for each 32 channels, a *stage*, 128 rows of 32 lo halves and 32 hi halves, in the 128-byte swizzle. So a stage of an
// operand is one bulk copy, and no tensor map is needed. A tile has a scale for each 64 channels, a *chunk*.
constexpr int unit_tiles = 128, unit_filters = 128, chunk_channels = 64, stage_channels = 32;
constexpr int operand_bytes = unit_tiles * stage_channels * 2 * 2;  // of a stage

// M of 128 tiles x 128 filters consists of segments of 4 tiles x 16 filters, as half a warp holds them after wgmma: 64
// floats, of which the lanes l = 0 .. 15 write four each: tile l / 4, filters 2 (l % 4), the next, and both + 8. So a
// warp writes 512 bytes side by side. The segment of a tile and a filter of the 128:
constexpr int segment_tiles = 4, segment_filters = 16;
constexpr __host__ __device__ int m_segment(int tile, int filter) {
  return (tile / 16 * 8 + filter / 16) * 4 + tile / 4 % 4;
}

// One task's times, for fastconv trace: %globaltimer in ns.
struct TraceRecord {
  unsigned long long begin, end;
  int kind, group, index, processor;
};

template <typename T>
struct Params {
  TaskMap map;
  const T* x;                   // [N, H, W, C]
  T* y;                         // [N, K, P, Q], either layout
  const char* u;                // [36][filter blocks][2 chunks][128 filters][lo, hi][32]
  const int* filter_exponents;  // [K]
  char* v;                      // [v_groups][36][2 chunks][128 tiles][lo, hi][32]
  int* tile_exponents;          // [groups * 128][chunks]: of the scales of V
  float* products;              // M [m_groups][36][filter blocks][m_segment()][64]
  int* tickets;                 // two, 128 bytes apart: of the GEMM tasks, and of all others
  int* counters;                // the map's
  TraceRecord* trace;           // [map.size()], GEMM tasks first; or null
  Epilogue<T> epilogue;
  WaitReport* report;
  int n, c, h, w, k, p, q, pad_h, pad_w;
  std::int64_t y_image, y_filter, y_row, y_pixel;  // strides of y and residual, in elements
  bool boxes;                                      // x can be copied as a tensor
  int tiles_p, tiles_q;
  int chunks, filter_blocks;
  int product_grab;  // GEMM tasks that a block takes at once: 1 to 4
  FastDivide by_tiles_q, by_tiles_p;
  unsigned delay;  // tests: a mask of ns by which tasks are delayed at random

  __host__ __device__ std::int64_t v_place_bytes() const { return std::int64_t{36} * chunks * 2 * operand_bytes; }
  __host__ __device__ std::int64_t m_place() const { return std::int64_t{36} * filter_blocks * unit_tiles * unit_filters; }  // elements
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
// That a counter has reached a value; counter null: nothing to wait for. (TaskMap::signals() without arrays.)
struct CounterWait {
  const int* counter;
  int value;

  __device__ __forceinline__ bool is_over() const { return counter == nullptr || load_acquire(counter) >= value; }
  // Bounded, like every wait, and in one asm block for the reason given at hopper::wait_in_place().
  template <int role>
  __device__ __forceinline__ void wait(WaitReport* report) const {
    if (counter == nullptr) return;
    asm volatile(
        "{\n.reg .pred p;\n.reg .u32 tries, old;\nmov.u32 tries, 0;\n"
        "again:\nld.acquire.gpu.global.s32 old, [%0];\nsetp.ge.s32 p, old, %1;\n@p bra done;\n"
        "add.u32 tries, tries, 1;\nsetp.lt.u32 p, tries, %5;\n@p bra again;\n"
#ifdef DEBUG_HANG
      ".reg .u64 at, wide;\n.reg .u32 lo, hi, seen;\nmov.u32 seen, old;\natom.sys.add.u32 old, [%2], 1;\nmul.lo.u32 tries, old, 16;\ncvt.u64.u32 wide, tries;\nadd.u64 at, %2, wide;\nmov.u32 lo, %4;\nadd.u32 lo, lo, 100;\nst.u32 [at+16], lo;\nmov.u32 old, %%ctaid.x;\nst.u32 [at+20], old;\nmov.b64 {lo, hi}, %0;\nst.u32 [at+24], lo;\nshl.b32 hi, seen, 16;\nadd.u32 hi, hi, %1;\nst.u32 [at+28], hi;\nmembar.sys;\nmov.u32 tries, 0;\nbra again;\n"
#endif
        "setp.eq.u64 p, %2, 0;\n@p bra stop;\n"
        "atom.sys.cas.b32 old, [%2], 0, 1;\nsetp.ne.u32 p, old, 0;\n@p bra stop;\n"
        "mov.u32 old, %%ctaid.x;\nst.u32 [%2+4], %3;\nst.u32 [%2+8], %4;\nst.u32 [%2+12], old;\nmembar.sys;\n"
        "stop:\ntrap;\ndone:\n}" ::"l"(counter),
        "r"(value), "l"(report), "n"(static_cast<int>(kernel_winograd_megakernel)), "n"(role), "n"(WaitSite::limit)
        : "memory");
  }
};
template <int role>
__device__ __forceinline__ void wait_in_place(std::uint64_t& barrier, unsigned parity, WaitReport* report) {
  hopper::wait_in_place<kernel_winograd_megakernel, role>(shared_address(&barrier), parity, report);
}
template <typename T>
__device__ __forceinline__ CounterWait wait_for(const Params<T>& params, TaskKind kind, int group, int value) {
  return {group < 0 ? nullptr : params.counters + TaskMap::counter_of(kind, group), value};
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
// For tests: a delay of up to `mask` ns, now and then, that depends on who asks when.
__device__ __forceinline__ void delay_randomly(unsigned mask) {
  if (mask == 0) return;
  unsigned clock;
  asm volatile("mov.u32 %0, %clock;" : "=r"(clock));
  const unsigned random = (clock ^ blockIdx.x * 0x9E3779B9u) * 0x85EBCA6Bu;
  if (random >> 30 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(random >> 8 & mask));
}

}  // namespace fastconv::algos::winograd_megakernel
