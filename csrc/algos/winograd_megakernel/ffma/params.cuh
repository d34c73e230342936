// What the parts of the FP32 kernel share: parameters, shared memory, the way a task is handed on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algos/winograd_megakernel/ffma/plan.h"
#include "algos/winograd_megakernel/shared/counters.cuh"
#include "algos/winograd_megakernel/shared/values.cuh"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/mma.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"
#include "hopper/wait_report.h"
#include "winograd/task_map.h"
#include "winograd/task_trace.cuh"

namespace fastconv::algos::winograd_megakernel::ffma {

// A GEMM task is one point of 128 tiles x 64 filters. V and U lie in memory so that a stage, 16 channels, is one
// piece of 8 KB and one of 4 KB, and points lie a constant number of bytes apart for those who transform.
struct Params {
  TaskMap map;
  const float* x;       // [N, C, H, W], either layout
  float* y;             // [N, K, P, Q], same layout
  const float* u;       // [filter blocks][36][stages][16 places of channels][64 filters]
  const float* weight;  // [K, C, 3, 3] if filter tasks make U, else null
  float* v;             // [v_groups][stages][36][16 octets of tiles][16 places of channels][8 tiles]
  float* products;      // M [m_groups][filter blocks][36][128 tiles][64 filters]
  int* ticket;
  int* counters;    // the map's
  int end;          // of the positions: map.size(), or where a kind of the series ends
  TaskTrace trace;  // [map.size()] by position, or off
  Epilogue<float> epilogue;
  WaitReport* report;
  int c, h, w, k, p, q, pad_h, pad_w;
  std::int64_t x_image, x_channel, x_row, x_pixel;  // strides, in elements
  std::int64_t y_image, y_filter, y_row, y_pixel;   // also of the residual
  int stages, filter_blocks;
  FastDivide by_tiles_q, by_tiles_p;
  unsigned delay;      // tests: a mask of ns by which tasks are delayed at random
  int x_step, y_step;  // x_pixel and y_pixel: within a tile 32 bits suffice

  __host__ __device__ std::int64_t v_place() const { return std::int64_t{36} * stages * stage_v; }
  __host__ __device__ std::int64_t m_place() const { return std::int64_t{36} * filter_blocks * tile_m * block_filters; }
};

// Where a stage's channel lies among its 16: eight channels of eight tiles, as a warp has them, are then two pieces of
// 128 bytes. In V the places of every second octet of tiles are exchanged in pairs, against bank conflicts.
constexpr __host__ __device__ int place_of(int channel) { return channel / 8 * 8 + channel % 2 * 4 + channel % 8 / 2; }

constexpr int team_warps = 4;

// The warp's number in its team.
__device__ __forceinline__ int team_warp() { return static_cast<int>(threadIdx.x) / 32 % team_warps; }

// A task as the dispatching warp hands it to the others.
struct alignas(16) WorkTile {
  int kind;          // TaskKind, or item_stop
  int group, place;  // place: in the ring of V (ITrans) or M
  int counter;       // to raise
  int tile, tiles;   // within the group
  int channel;       // the first channel or filter
  int count;         // of channels or filters; GEMM: the point
  int position;      // in the map
};
constexpr int work_tile_stop = 4;

constexpr int team_threads = 32 * team_warps;
// Of a block: the teams, and four warps, of which one dispatches for each team. So a thread has 128 registers: with 112
// the compiler finds no numbers for the products' that keep clear of bank conflicts, and they take a third longer.
constexpr int threads = team_threads * teams + 128;
static_assert(threads == 512);
constexpr int slots = 4;  // of the ring of stages

struct Shared {  // of a team
  struct Stage {
    float v[tile_m / 8][stage_channels][8];
    float u[stage_channels][block_filters];
  };
  alignas(128) Stage stages[slots];
  std::uint64_t full[slots], empty[slots];
  std::uint64_t work_tile_full[2], work_tile_empty[2];
  WorkTile work_tiles[2];
};

// ---- Barriers in shared memory: mbarriers as sm_80 has them (hopper/ptx/mbarrier.cuh needs sm_90).

__device__ __forceinline__ void barrier_init(std::uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive(std::uint64_t& barrier) { arrive(shared_address(&barrier)); }
// What this thread has read from shared memory, by ordinary loads, happens before copies that others start once it has
// arrived. Without it a copy now and then overwrote what a load was still to read: 3 of 3000 launches were wrong.
__device__ __forceinline__ void release_reads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Until the phase of that parity has ended. Bounded; in one asm block, as hopper::wait_in_place(), to cost no
// registers.
template <int role>
__device__ __forceinline__ void wait(std::uint32_t barrier, unsigned parity, WaitReport* report) {
  static_assert(offsetof(WaitReport, kernel) == 4 && offsetof(WaitReport, role) == 8 &&
                offsetof(WaitReport, block) == 12);
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 tries, old;\nmov.u32 tries, 0;\n"
#if __CUDA_ARCH__ >= 900
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
#elif __CUDA_ARCH__ >= 800
      // 64 polls for one of the other kind, which waits a while in hardware.
      "again:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\n"
#else
      "again:\nsetp.eq.u32 p, %1, 0;\n"
#endif
      "add.u32 tries, tries, 1;\nsetp.lt.u32 p, tries, %5;\n@p bra again;\n"
      "setp.eq.u64 p, %2, 0;\n@p bra stop;\n"
      "atom.sys.cas.b32 old, [%2], 0, 1;\nsetp.ne.u32 p, old, 0;\n@p bra stop;\n"
      "mov.u32 old, %%ctaid.x;\nst.u32 [%2+4], %3;\nst.u32 [%2+8], %4;\nst.u32 [%2+12], old;\nmembar.sys;\n"
      "stop:\ntrap;\ndone:\n}" ::"r"(barrier),
      "r"(parity), "l"(report), "n"(static_cast<int>(kernel_winograd_megakernel)), "n"(role),
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      "n"(WaitSite::limit)
#else
      "n"(WaitSite::limit * 64)
#endif
      : "memory");
}
template <int role>
__device__ __forceinline__ void wait(std::uint64_t& barrier, unsigned parity, WaitReport* report) {
  wait<role>(shared_address(&barrier), parity, report);
}

// ---- Counters in device memory

// Until the counter has reached the value: polls without ordering, which would empty the L1 cache each time.
__device__ __forceinline__ void wait_for(const int* counter, int value, WaitReport* report) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .s32 seen;\n.reg .u32 tries, old;\nmov.u32 tries, 0;\n"
      "again:\nld.relaxed.gpu.global.s32 seen, [%0];\nsetp.ge.s32 p, seen, %1;\n@p bra done;\n"
      "add.u32 tries, tries, 1;\nsetp.lt.u32 p, tries, %5;\n@p bra again;\n"
      "setp.eq.u64 p, %2, 0;\n@p bra stop;\n"
      "atom.sys.cas.b32 old, [%2], 0, 1;\nsetp.ne.u32 p, old, 0;\n@p bra stop;\n"
      "mov.u32 old, %%ctaid.x;\nst.u32 [%2+4], %3;\nst.u32 [%2+8], %4;\nst.u32 [%2+12], old;\nmembar.sys;\n"
      "stop:\ntrap;\ndone:\nld.acquire.gpu.global.s32 seen, [%0];\n}" ::"l"(counter),
      "r"(value), "l"(report), "n"(static_cast<int>(kernel_winograd_megakernel)), "n"(static_cast<int>(role_signal)),
      "n"(WaitSite::limit)
      : "memory");
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
