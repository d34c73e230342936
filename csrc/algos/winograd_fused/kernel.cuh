// The kernel: three warpgroups in two roles, two passes over the items.
#pragma once

#include "algos/winograd_fused/output.cuh"

namespace fastconv::algos::winograd_fused {

__device__ __forceinline__ void initialise(Shared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < raw_stages; ++i) {
      hopper::barrier_init(shared_address(&shared.raw_full[i]), 1);
      hopper::barrier_init(shared_address(&shared.raw_empty[i]), producer_warps);
    }
    for (int i = 0; i < v_stages; ++i) {
      hopper::barrier_init(shared_address(&shared.v_full[i]), producer_warps);
      hopper::barrier_init(shared_address(&shared.v_empty[i]), consumer_threads / 32);
    }
    hopper::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < most_items / 32; i += block_threads) shared.repeat[i] = 0;
  __syncthreads();
}

template <int group, Output output>
__device__ __forceinline__ void run_consumers(const Params& params, Shared& shared) {
  ConsumerState state;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    consume<group, output>(params, shared, pass == 1, state);
    synchronise<pass_barrier, block_threads>();
  }
}

// boxes: x is loaded by tensor copies, through `maps`; else by element.
template <bool boxes, Output output>
__global__ void __launch_bounds__(block_threads, 1)
    convolve(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  initialise(shared);
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == consumer_groups) {
    hopper::shrink_registers<producer_registers>();
    ProducerState state;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      produce<boxes>(params, maps, shared, pass == 1, state);
      synchronise<pass_barrier, block_threads>();
    }
  } else if (group == 0) {
    hopper::grow_registers<consumer_registers>();
    run_consumers<0, output>(params, shared);
  } else {
    hopper::grow_registers<consumer_registers>();
    run_consumers<1, output>(params, shared);
  }
#endif
}

}  // namespace fastconv::algos::winograd_fused
