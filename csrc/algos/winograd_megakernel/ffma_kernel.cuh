// The kernel of class `ieee`: persistent blocks, two of a multiprocessor where they fit, whose eight working warps do
// one task after the other, whatever its kind. While one block transforms and waits for memory, the other multiplies.
#pragma once

#include "algos/winograd_megakernel/ffma_dispatch.cuh"
#include "algos/winograd_megakernel/ffma_multiply.cuh"
#include "algos/winograd_megakernel/ffma_transforms.cuh"

namespace fastconv::algos::winograd_megakernel::ffma {

constexpr int shared_bytes = teams * static_cast<int>(sizeof(Shared));

template <Access access, bool plain>
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
    for (int i = 0; i < 2; ++i) barrier_init(shared.item_full[i], 1), barrier_init(shared.item_empty[i], 1);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __syncthreads();
  if (threadIdx.x >= teams * team_threads) {
    if (const unsigned team = threadIdx.x / 32 - teams * team_warps; team < teams) {
      Dispatcher(params, all[team], static_cast<int>(team)).run();
    }
    return;
  }
  RingPosition ring;
#ifdef FFMA_SKIP
  if (params.debug && blockIdx.x == 0 && threadIdx.x == 0) {
    long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    params.debug[0] = clock64(), params.debug[1] = t;
  }
#endif
#pragma unroll 1
  for (unsigned count = 0;; ++count) {
    const unsigned at = count % 2, team = fresh_thread() / team_threads;
    Shared& shared = all[team];
    wait<role_stream>(shared.item_full[at], count / 2 & 1, params.report);
    const Item& item = shared.items[at];  // not copied: registers are what is scarce
#ifdef FFMA_SKIP
    if (item.kind == item_stop && params.debug && blockIdx.x == 0 && threadIdx.x == 0) {
      long long t;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
      params.debug[2] = clock64(), params.debug[3] = t;
    }
#endif
    if (item.kind == item_stop) return;
#ifdef FFMA_SKIP
    if (params.skip >> item.kind & 1) {
    } else
#endif
        if (item.kind == static_cast<int>(TaskKind::gemm)) {
      multiply(params, all, at, ring);
    } else if (item.kind == static_cast<int>(TaskKind::input)) {
      transform_input<access>(params, item);
    } else {
      transform_output<access, plain>(params, item);
    }
    const unsigned thread = fresh_thread();
    // The barrier counts warps, not threads: one that came in parts, after a break of some lanes, would count twice.
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + thread / team_threads), "n"(team_threads) : "memory");
    if (thread % team_threads == 0) {
      Shared& shared = all[thread / team_threads];
      const int counter = shared.items[at].counter, position = shared.items[at].position;
      arrive(shared.item_empty[at]);
      raise(params.counters + counter);
      params.trace.end(position);
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
