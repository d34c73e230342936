// The kernel of class `ieee`: a persistent block of each multiprocessor, in which three teams of four warps do one task
// after the other, whatever its kind. While one team transforms and waits for memory, the others multiply.
#pragma once

#include "algos/winograd_megakernel/ffma/dispatch.cuh"
#include "algos/winograd_megakernel/ffma/filter_task.cuh"
#include "algos/winograd_megakernel/ffma/multiply.cuh"
#include "algos/winograd_megakernel/ffma/transforms.cuh"

namespace fastconv::algos::winograd_megakernel::ffma {

constexpr int shared_bytes = teams * static_cast<int>(sizeof(Shared));
static_assert(shared_bytes == block_bytes);  // what supports() asks for

// filters: tasks of the kernel make U, which is otherwise packed beforehand.
template <Access access, bool plain, bool filters>
__global__ void __launch_bounds__(threads, 1) convolve(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  Shared* const all = reinterpret_cast<Shared*>(dynamic);
  if (threadIdx.x < teams) {
    Shared& shared = all[threadIdx.x];
    for (int i = 0; i < slots; ++i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      barrier_init(shared.full[i], 1);
#else
      barrier_init(shared.full[i], 32);
#endif
      barrier_init(shared.empty[i], team_warps);
    }
    for (int i = 0; i < 2; ++i) barrier_init(shared.work_tile_full[i], 1), barrier_init(shared.work_tile_empty[i], 1);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    hopper::barrier_init_fence();
#endif
  }
  __syncthreads();
  if (threadIdx.x >= teams * team_threads) {
    if (const unsigned team = threadIdx.x / 32 - teams * team_warps; team < teams) {
      TransformTaskFetcher<filters>(params, all[team], static_cast<int>(team)).run();
    }
    return;
  }
  const int team = static_cast<int>(threadIdx.x) / team_threads;
  Shared& shared = all[team];
  hopper::RingPosition ring;  // of stages
#pragma unroll 1
  for (unsigned count = 0;; ++count) {
    const unsigned at = count % 2;
    wait<role_stream>(shared.work_tile_full[at], count / 2 & 1, params.report);
    const WorkTile& work_tile = shared.work_tiles[at];  // not copied: registers are what is scarce
    if (work_tile.kind == work_tile_stop) return;
    if (work_tile.kind == static_cast<int>(TaskKind::gemm)) {
      multiply(params, shared, work_tile, ring);
    } else if (work_tile.kind == static_cast<int>(TaskKind::input)) {
      transform_input<access>(params, work_tile);
    } else if (filters && work_tile.kind == static_cast<int>(TaskKind::filter)) {
      transform_filters(params, work_tile);
    } else {
      transform_output<access, plain>(params, work_tile);
    }
    // The barrier counts warps, not threads: one that came in parts, after a break of some lanes, would count twice.
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(team_threads) : "memory");
    if (threadIdx.x % team_threads == 0) {
      int* const counter = params.counters + work_tile.counter;
      const int position = work_tile.position;
      arrive(shared.work_tile_empty[at]);
      raise(counter);
      params.trace.end(position);
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
