// The kernel of class `ieee`: persistent blocks, two of a multiprocessor where they fit, whose eight working warps do
// one task after the other, whatever its kind. While one block transforms and waits for memory, the other multiplies.
#pragma once

#include "algos/winograd_megakernel/ffma_dispatch.cuh"
#include "algos/winograd_megakernel/ffma_multiply.cuh"
#include "algos/winograd_megakernel/ffma_transforms.cuh"

namespace fastconv::algos::winograd_megakernel::ffma {

constexpr int shared_bytes = sizeof(Shared);

// A quarter of a multiprocessor has two working warps of a block and one of the four that dispatch, which share what
// the three start with. (Only Hopper can move registers; elsewhere one block has them all.)
constexpr int launch_registers = 80, working_registers = 104, dispatch_registers = 32;
static_assert(2 * working_registers + dispatch_registers <= 3 * launch_registers &&
              2 * threads * launch_registers <= 65536);

template <Access access, bool plain>
__global__ void __launch_bounds__(threads, blocks_per_processor) convolve(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  if (threadIdx.x == 0) {
    for (int i = 0; i < slots; ++i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      barrier_init(shared.full[i], 1);
#else
      barrier_init(shared.full[i], 32);
#endif
      barrier_init(shared.empty[i], multiplying_warps);
    }
    for (int i = 0; i < 2; ++i) barrier_init(shared.item_full[i], 1), barrier_init(shared.item_empty[i], 1);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __syncthreads();
  if (threadIdx.x >= working_threads) {
#if defined(FASTCONV_HAS_WGMMA) && !defined(FFMA_ONE)
    hopper::shrink_registers<dispatch_registers>();
#endif
    if (threadIdx.x < working_threads + 32) Dispatcher(params, shared).run();
    return;
  }
#if defined(FASTCONV_HAS_WGMMA) && !defined(FFMA_ONE)
  hopper::grow_registers<working_registers>();
#endif
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
    const unsigned at = count % 2;
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
      if (item.tiles > block_filters) {
        multiply<2 * block_filters>(params, shared, item, ring);
      } else {
        multiply<block_filters>(params, shared, item, ring);
      }
    } else if (item.kind == static_cast<int>(TaskKind::input)) {
      transform_input<access>(params, item);
    } else {
      transform_output<access, plain>(params, item);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(working_threads) : "memory");
    if (threadIdx.x == 0) {
      arrive(shared.item_empty[at]);
      raise(params.counters + item.counter);
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
